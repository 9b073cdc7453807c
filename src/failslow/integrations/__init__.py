"""Adapters for training frameworks whose loops hide what `failslow.Coordinator` needs to set."""
