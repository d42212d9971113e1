"""LoRA adapters in a rank: from PEFT's files to the arena that all ranks read (`engine/checkpoint/adapters/layout.py`).

How an adapter gets there while steps run:

    POST /v1/load_lora_adapter -> supervisor: a free slot of the arena, a number      (engine/supervisor/adapters.py)
      -> the first rank: `reader.py` checks the files, `arena.py` writes the slot     (no running row uses it)
      -> supervisor: the record (adapters.json), from then on the adapter is served
    a request names it -> its slot and its contents' hash travel with the request: into the keys of its blocks, and by SlotStart
      to the ranks, where rows have `adapter_slots` -> `OpTable.adapt` adds to the output of a linear for its rows

Read `reader.py` first.
"""
