"""A run that is over, or goes on elsewhere, told from the log it wrote."""
