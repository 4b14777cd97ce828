"""A run that is over, or runs elsewhere, reconstructed from its log."""
