"""`megaprec prove`: the proof that a run repeats and resumes bit for bit."""
