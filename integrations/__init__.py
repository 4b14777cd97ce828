"""Where frameworks build a loader of their own, and how penstock's stays in it.

accelerate      prepare and skip_first_batches, as Accelerate's own
transformers    TrainerMixin: for a Trainer of transformers

Lightning, ignite and torchtnt take `penstock.DataLoader` as it is.
"""
