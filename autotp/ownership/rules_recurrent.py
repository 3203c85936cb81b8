"""Recurrent layers: each step mixes all hidden features of the one before, so there is nothing to cut inside."""

from __future__ import annotations

from autotp.ownership.engine import Ownership
from autotp.ownership.registry import rule
from autotp.record import Op


@rule("mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "miopen_rnn", "lstm", "gru")
def recurrent(own: Ownership, op: Op) -> None:
    """All whole; its matrices are kept in parts between uses."""
    own.all_whole(op, "each step of a recurrent layer reads all hidden features")
