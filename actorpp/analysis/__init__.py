"""What a run's spans say: steps, bounds, bubbles, and the pages and tables made of them. It measures nothing itself."""
