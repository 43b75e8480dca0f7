"""Evidence: plain data from ranks and reference runs, one module a subject. Gathered with torch, judged without."""
