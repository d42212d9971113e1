"""LoRA adapters in a rank: from PEFT's files to the arena that all ranks read (`engine/checkpoint/adapters/layout.py`).

An adapter's way, all of it beside the steps that run:

    POST /v1/load_lora_adapter -> supervisor: a free slot of the arena, a number      (engine/supervisor/adapters.py)
      -> the first rank: `reader.py` checks the files, `arena.py` writes the slot     (no running row uses it)
      -> supervisor: the record (adapters.json), from then on the adapter is served
    a request names it -> its slot and its contents' hash travel with the request: into the keys of its blocks, and by SlotStart
      to the ranks, whose rows then have `adapter_slots` -> `OpTable.adapt` adds to what a linear gives its rows

Read `reader.py` first.
"""
