"""Who is there, what is newest, who has which pieces: the seam (`base`) and its implementations."""
