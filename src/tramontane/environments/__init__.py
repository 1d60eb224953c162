"""Conversations: what a model talks to between two turns, its tools, and the tokens put in.

An environment is any class with `start(problem)` and `step(message)`; a toolbox is a class whose
public methods are tools. Nothing needs to be imported from here to write one.
"""
