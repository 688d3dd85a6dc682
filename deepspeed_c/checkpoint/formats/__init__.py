"""Formats of DeepSpeed, torch and Hugging Face, and the files and pickles that they are made of."""
