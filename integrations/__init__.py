"""Where frameworks build a loader of their own, and how penstock's stays in it.

accelerate      prepare and skip_first_batches, as Accelerate's own
transformers    TrainerMixin: for a Trainer of transformers
lightning       verdict_logger: what penstock finds, for Lightning's loggers
tensorboard     log_verdicts: the same as scalars
prometheus      serve: figures to scrape, and grafana.json, a dashboard of them

Lightning, ignite and torchtnt take `penstock.DataLoader` as it is.
"""
