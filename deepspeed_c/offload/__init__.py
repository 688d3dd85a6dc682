"""The homes of idle states: the plan that chooses them, and the file for states without room in device or host memory
(arXiv 2104.07857)."""
