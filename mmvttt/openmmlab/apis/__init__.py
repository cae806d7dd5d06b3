"""Functions behind the tools: training, testing, inference and export, for every toolbox."""
