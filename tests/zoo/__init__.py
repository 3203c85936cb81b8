"""Hundreds of architectures, sharded against themselves: a runner, its record and the coverage page made from it."""
