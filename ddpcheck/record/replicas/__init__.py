"""The replica on a rank, models beside it, and what the program keeps of them."""
