"""Long sequences: cut over ranks, computed in tiles, parked in host memory while they wait."""
