"""Where idle states live: the plan that says it, and the file that holds what neither device nor host memory has room
for (arXiv 2104.07857)."""
