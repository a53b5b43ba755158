"""The sources of samples: synthetic, Criteo, Parquet, or a user's class."""
