"""The user's wish: which modules become what, and how strictly."""
