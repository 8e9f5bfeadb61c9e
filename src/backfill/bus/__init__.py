"""The bus that several engines share: its file, what they publish there, and their turns."""
