"""What runs on the ranks: collectives with their gradients, and the style that runs a module's local program."""
