"""Hubs that models are downloaded from. Called only by the launcher and by `tokamak pull`.

hub.py          what every hub offers, and the choice by name
huggingface.py  the Hugging Face hub, and its mirrors
modelscope.py   ModelScope
"""
