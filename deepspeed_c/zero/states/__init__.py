"""Masters and optimizer states: the step, where they live between steps, and who reads or edits them."""
