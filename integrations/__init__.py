"""Penstock inside other frameworks, and its figures in their monitors.

    accelerate      prepare and skip_first_batches, with penstock's loader
    transformers    TrainerMixin: for the Trainer of transformers
    lightning       verdict_logger: verdicts for Lightning's loggers
    tensorboard     log_verdicts: verdicts as scalars
    prometheus      serve: figures to scrape

Lightning, ignite and torchtnt accept `penstock.DataLoader` as it is.
"""
