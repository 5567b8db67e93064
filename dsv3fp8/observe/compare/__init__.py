"""Recipes against one another: train them alike, or read runs that exist, and say what each costs."""
