"""What the tools call: training, testing and inference, for every toolbox."""
