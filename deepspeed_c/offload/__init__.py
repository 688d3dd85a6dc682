"""The homes of states that are not in use: the choice of a home, and a file for states that fit neither device memory
nor host memory (arXiv 2104.07857)."""
