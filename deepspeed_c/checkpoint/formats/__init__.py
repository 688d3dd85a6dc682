"""Formats of DeepSpeed, torch and Hugging Face, and the files and pickles in these formats."""
