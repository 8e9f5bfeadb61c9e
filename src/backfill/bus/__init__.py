"""The bus that several engines share: its file, what they tell each other there, and their turns."""
