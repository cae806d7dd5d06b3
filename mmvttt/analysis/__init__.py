"""Looking at runs and models: curves, drawn predictions."""
