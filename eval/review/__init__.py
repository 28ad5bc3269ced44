"""Layer 3: people compare answers blind. `draw` picks, `pack` seals, `web` asks, `score` judges."""
