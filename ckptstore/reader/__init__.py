"""Reading: which parts hold what is wanted, are their bytes those that were written, and where do they go?"""
