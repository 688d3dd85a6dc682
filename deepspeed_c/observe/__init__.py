"""What a run says of itself: where the time of its steps goes, and the numbers that logs and monitors listen to."""
