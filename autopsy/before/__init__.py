"""Two questions to ask before anything is bad. Delete this folder, and its two flags are gone."""
