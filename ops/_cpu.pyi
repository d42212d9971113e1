"""The native module (ops/cpu/native). Tensors are addresses (0: none) of contiguous float32 or int32 rows; `ops.cpu.table` is
the one caller. The last two arguments of an op are the address of its number of rows (int32, read whenever it runs; 0: none)
and the number itself where there is no address."""

import numpy as np

PANEL: int  # outputs side by side in packed weights
FOLDED_GROUPS: tuple[int, ...]  # sizes of groups whose scales can be folded into the integers
KEY_PANEL: int  # slots side by side in the KV cache
KEY_SPLIT: int
MAX_HEAD_DIM: int
MAX_GROUP: int  # query heads of a kv head
SLOT_SAMPLING_BYTES: int

COMM_LAYOUT: dict[str, int]  # of native/comm.h, as shm/rank_group.py has it
COMM_KINDS: list[str]

class Op: ...
class RankGroupBroken(RuntimeError): ...  # args: text, rank, epoch

class Comm:
    """A rank's part in a group; sizes are in bytes, or in floats where they are added up. RuntimeError: a peer did not come, or
    made another call."""

    def __init__(self, arena: int, rank: int, first: int, count: int, spin_ns: int, timeout_ns: int, lines: int) -> None: ...
    def join(self, epoch: int, members: int) -> None: ...
    def begin_step(self, step: int, versions: int) -> None: ...
    def check_epoch(self) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def waited_ns(self) -> int: ...
    @property
    def num_calls(self) -> int: ...
    def barrier(self) -> None: ...
    def all_gather(self, y: int, x: int, num_bytes: int) -> None: ...
    def all_reduce(self, y: int, x: int, count: int) -> None: ...
    def reduce_scatter(self, y: int, x: int, count: int) -> None: ...
    def broadcast(self, values: int, num_bytes: int, root: int) -> None: ...
    def all_to_all(self, y: int, most: int, received: int, x: int, sent: int) -> None: ...

def embedding(
    y: int,
    weight: int,
    scales: int,
    multipliers: int,
    offsets: int,
    scale_kind: int,  # of scales and offsets, as in ops.cpu.int_packing
    token_ids: int,
    width: int,
    group_size: int,
    kind: int,  # of the weight, as in ops.cpu.packing
    is_in_panels: bool,
    rows: int,
    count: int,
) -> Op: ...
def linear(
    y: int,
    x: int,
    kind: int,  # of the weight, as in ops.cpu.packing
    weight: int,
    scales: int,
    multipliers: int,
    offsets: int,
    scale_kind: int,  # of scales and offsets, as in ops.cpu.int_packing
    bias: int,
    num_inputs: int,
    num_outputs: int,
    group_size: int,
    panels: list[int],  # begins and ends of those to compute; empty: all
    rows: int,
    count: int,
) -> Op: ...
def adapt(
    y: int,
    x: int,
    adapter_slots: int,
    slots: int,
    ranks: int,
    num_slots: int,
    slot_floats: int,
    num_modules: int,
    num_inputs: int,
    num_outputs: int,
    parts: list[int],  # of each its first output, outputs, place in the table, A, B, and the panels [begin, end) to compute
    rows: int,
    count: int,
) -> Op: ...
def take_features(
    y: int,
    features: int,
    feature_rows: int,
    num_rows: int,  # of the features
    feature_bytes: int,  # of a row
    first: int,  # column of the features
    width: int,
    is_bfloat16: bool,
    is_added: bool,
    rows: int,
    count: int,
) -> Op: ...
def rms_norm(
    y: int, total: int, x: int, residual: int, weight: int, epsilon: float, width: int, rows: int, count: int
) -> Op: ...
def layer_norm(
    y: int, total: int, x: int, residual: int, weight: int, bias: int, epsilon: float, width: int, rows: int, count: int
) -> Op: ...
def map_slots(
    slots: int,
    positions: int,
    row_slots: int,
    block_tables: int,
    table_width: int,
    block_size: int,
    rows: int,
    count: int,
) -> Op: ...
def rotate_and_store(
    queries: int,
    qkv: int,
    qkv_width: int,
    queries_at: int,  # column of the first of the heads
    keys_at: int,
    values_at: int,
    keys: int,
    values: int,
    positions: int,
    slots: int,
    cosines: int,
    sines: int,
    partners: int,
    query_weight: int,
    key_weight: int,
    value_weight: int,
    epsilon: float,
    is_normalized_after: bool,  # after the rotation
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_type: int,
    block_size: int,
    first_cached_head: int,  # where the KV heads are in the cache
    block_bytes: int,  # of keys, and of values
    rows: int,
    count: int,
) -> Op: ...
def attention(
    y: int,
    queries: int,
    keys: int,
    values: int,
    sequence_slots: int,
    sequence_offsets: int,
    sequence_starts: int,
    block_tables: int,
    table_width: int,
    has_bounds: int,  # whether rows have first and last keys
    first_keys: int,
    last_keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int,
    has_chunks: bool,
    is_two_sided: bool,
    scale: float,  # 0: head_dim^-0.5
    softcap: float,  # 0: none
    sinks: int,  # of all heads; 0: none
    first_sink: int,
    kv_type: int,
    block_size: int,
    first_cached_head: int,
    block_bytes: int,  # of keys, and of values
    rows: int,  # the number of sequences
    count: int,
) -> Op: ...
def normalize_wide(
    y: int,
    x: int,
    query_weight: int,
    key_weight: int,
    epsilon: float,
    head_dim: int,  # 0: queries are normalized as one
    queries: int,  # numbers of a row
    keys: int,
    values: int,
    rows: int,
    count: int,
) -> Op: ...
def choose(
    ids: int,
    weights: int,
    factors: int,
    all_ids: int,
    all_weights: int,
    num_chosen: int,
    index: int,
    rows: int,
    count: int,
) -> Op: ...
def mean_rows(y: int, x: int, joined: int, width: int, rows: int, count: int) -> Op: ...
def adjust_columns(y: int, x: int, rules: int, width: int, at: int, y_width: int, rows: int, count: int) -> Op: ...
def multiply(
    y: int,
    x: int,
    factors: int,
    row_factors: int,  # of each row; 0: one for all rows
    first: int,  # the factor of column 0
    width: int,
    begin: int,
    end: int,
    rows: int,
    count: int,
) -> Op: ...
def scale_and_add(y: int, x: int, other: int, factor: float, width: int, rows: int, count: int) -> Op: ...
def activate(
    y: int,
    x: int,
    activation: int,
    alpha: float,  # of `GateClamp`
    limit: float,  # likewise; 0: no clamp
    width: int,
    begin: int,
    end: int,
    rows: int,
    count: int,
) -> Op: ...
def activate_and_multiply(
    y: int,
    x: int,
    activation: int,
    alpha: float,
    limit: float,
    width: int,
    begin: int,
    end: int,
    rows: int,
    count: int,
) -> Op: ...
def store_latent(
    y: int,
    queries: int,
    row_floats: int,  # of queries
    queries_at: int,  # the first of `num_heads` heads in a row
    compressed: int,
    keys: int,
    latents: int,
    positions: int,
    slots: int,
    cosines: int,
    sines: int,
    partners: int,
    weight: int,
    epsilon: float,
    num_heads: int,
    plain_dim: int,
    rotary_dim: int,
    latent_dim: int,
    kv_type: int,
    block_size: int,
    rows: int,
    count: int,
) -> Op: ...
def latent_attention(
    y: int,
    absorbed: int,
    queries: int,
    keys: int,
    latents: int,
    sequence_slots: int,
    sequence_offsets: int,
    sequence_starts: int,
    block_tables: int,
    table_width: int,
    has_bounds: int,
    first_keys: int,
    last_keys: int,
    num_heads: int,
    plain_dim: int,
    rotary_dim: int,
    latent_dim: int,
    scale: float,
    kv_type: int,
    block_size: int,
    rows: int,  # the number of sequences
    count: int,
) -> Op: ...
def head_linear(
    y: int,
    x: int,
    kind: int,  # float32 or bfloat16
    weight: int,
    weight_bytes: int,  # of a head
    num_inputs: int,
    num_outputs: int,
    first_head: int,
    num_heads: int,
    stride: int,  # inputs of a head in x
    rows: int,
    count: int,
) -> Op: ...
def convolve(
    y: int,
    x: int,
    x_floats: int,  # of a row
    x_at: int,  # column of x
    weight: int,  # [taps, channels]
    bias: int,
    channels: int,
    taps: int,
    is_activated: bool,
    is_gated: bool,
    columns: list[int],  # begins and ends of the channels to compute
    window_at: int,  # in a slot, in bytes
    log_at: int,
    memory: int,
    num_slots: int,
    slot_bytes: int,
    num_logged: int,
    sequence_offsets: int,
    sequence_starts: int,
    states: int,
    rows: int,  # the number of sequences
    count: int,
) -> Op: ...
def delta_rule(
    y: int,
    x: int,
    decays: int,
    betas: int,
    y_floats: int,  # of a row
    x_floats: int,
    decay_floats: int,
    beta_floats: int,
    x_at: int,  # column of the first query of all heads
    decays_at: int,
    betas_at: int,
    rates: int,
    biases: int,
    is_by_key: bool,
    epsilon: float,
    num_heads: int,
    num_key_heads: int,
    key_dim: int,
    value_dim: int,
    first_head: int,
    num_own_heads: int,
    matrix_at: int,  # in a slot, in bytes
    log_at: int,
    log_bytes: int,  # of a row
    memory: int,
    num_slots: int,
    slot_bytes: int,
    num_logged: int,
    sequence_offsets: int,
    sequence_starts: int,
    states: int,
    rows: int,  # the number of sequences
    count: int,
) -> Op: ...
def state_space(
    y: int,
    x: int,
    decays: int,
    y_floats: int,
    x_floats: int,
    decay_floats: int,
    x_at: int,
    decays_at: int,
    rates: int,
    biases: int,
    skips: int,
    least: float,  # limits of dt
    most: float,
    num_heads: int,
    num_groups: int,
    state_dim: int,
    head_dim: int,
    first_head: int,
    num_own_heads: int,
    matrix_at: int,
    log_at: int,
    log_bytes: int,
    memory: int,
    num_slots: int,
    slot_bytes: int,
    num_logged: int,
    sequence_offsets: int,
    sequence_starts: int,
    states: int,
    rows: int,  # the number of sequences
    count: int,
) -> Op: ...
def gated_norm(
    y: int,
    x: int,
    gate: int,  # 0: none
    weight: int,  # 0: no norm
    y_floats: int,  # of a row
    x_floats: int,
    gate_floats: int,
    x_at: int,  # column of the first group, in x and y
    gate_at: int,
    weight_at: int,
    num_groups: int,
    group: int,
    weight_step: int,  # from one group to the next
    epsilon: float,
    is_gated_first: bool,
    is_sigmoid: bool,
    rows: int,
    count: int,
) -> Op: ...
def gather(
    y: int,
    x: int,
    comm: int,  # Comm.address
    y_width: int,
    x_width: int,
    begin: int,  # column of y
    first: int,  # column of x
    num_columns: int,
    rows: int,
    count: int,
) -> Op: ...
def collective(
    y: int,
    x: int,
    comm: int,
    kind: int,  # index in COMM_KINDS
    row_bytes: int,  # of an all_to_all: what y has room for
    root: int,
    received: int,  # of an all_to_all: int64, bytes from each rank and to each
    sent: int,
    rows: int,
    count: int,
) -> Op: ...
def route(
    ids: int,
    weights: int,
    logits: int,
    correction: int,
    scales: int,
    num_experts: int,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    num_best: int,  # experts that count for a group
    is_softmax: bool,
    is_normalized: bool,
    added_to_sum: float,
    smallest_sum: float,
    factor: float,
    sets: int,  # of each row
    set: int,
    num_tokens: int,  # the rows from there on are padding
    rows: int,
    count: int,
) -> Op: ...
def experts(
    y: int,
    results: int,
    x: int,
    ids: int,
    weights: int,
    shared: int,
    slots: int,
    gate_up_kind: int,
    gate_up: int,
    gate_up_scales: int,
    gate_up_multipliers: int,
    gate_up_offsets: int,
    gate_up_scale_kind: int,
    gate_up_group_size: int,
    gate_up_bias: int,  # [experts, outputs, padded to whole panels]; 0: none
    down_kind: int,
    down: int,
    down_scales: int,
    down_multipliers: int,
    down_offsets: int,
    down_scale_kind: int,
    down_group_size: int,
    down_bias: int,
    activation: int,
    alpha: float,
    limit: float,
    is_gated: bool,
    hidden: int,
    inner: int,
    num_experts: int,
    num_chosen: int,
    comm: int,  # Comm.address of all ranks; 0: there is one
    windows: int,
    max_rows: int,  # of a rank
    first_rank: int,  # of those that have the same rows
    num_ranks: int,
    owners: int,
    counts: int,
    tensor_comm: int,  # Comm.address of those that have other columns of each expert; 0: nobody
    activated: int,  # memory of all of them
    gate_up_panels: list[int],  # begins and ends of those to compute; empty: all
    down_panels: list[int],
    begin: int,  # columns of what is activated
    end: int,
    y_begin: int,  # columns of y
    y_end: int,
    adapter_slots: int,  # of the rows; 0: the experts have no adapters
    adapters: int,
    ranks: int,
    num_adapters: int,
    slot_floats: int,
    modules: int,
    index_step: int,  # from one expert to the next
    float_step: int,
    gate_up_parts: list[int],  # seven numbers each, of the first expert
    down_parts: list[int],
    rows: int,
    count: int,
) -> Op: ...
def run(op: Op) -> None: ...
def pack_panels(
    packed: int,
    kind: int,  # float32 or bfloat16
    weight: int,
    is_bfloat16: bool,  # what `weight` holds; else float32. Strides are counted in numbers
    output_stride: int,
    input_stride: int,
    num_outputs: int,
    num_inputs: int,
) -> None: ...
def quantize_weight(
    packed: int,
    scales: int,  # int8: [panels, groups, PANEL], int4: [panels, PANEL]
    multipliers: int,  # int4: [panels, groups, PANEL]
    kind: int,  # int8 or int4
    weight: int,
    is_bfloat16: bool,
    output_stride: int,
    input_stride: int,
    num_outputs: int,
    num_inputs: int,
    group_size: int,  # 0: all inputs
    has_narrow_scales: bool,  # int8: scales are numbers of bfloat16
    importances: int,  # float32 [inputs]: what a squared error costs at each; 0: |w|
) -> None: ...
def lay_integers(
    packed: int,
    kind: int,
    weight: int,  # int8, or int4 one in a byte
    output_stride: int,
    input_stride: int,
    num_outputs: int,
    num_inputs: int,
    zero: int,  # what stands where nothing is stored
) -> None: ...
def pack_rows(
    packed: int,
    kind: int,
    weight: int,
    is_bfloat16: bool,
    row_stride: int,
    column_stride: int,
    num_rows: int,
    num_columns: int,
) -> None: ...
def are_finite(values: int, count: int, num_bytes: int, exponent: int) -> bool: ...  # no float with these bits of it all set
def checksum(address: int, num_bytes: int) -> int: ...  # 64 bits, in parallel; the same for any number of threads
def checksums(sums: int, address: int, num_bytes: int, piece_bytes: int) -> None: ...  # uint64, of each piece

# of every op from now on, the caller's included; with `cores`, each on its own, the caller on the first
def set_num_threads(count: int, cores: list[int] = ...) -> None: ...
def set_heartbeat(word: int) -> None: ...  # address of a uint64 that is written from now on; 0: none
def num_threads() -> int: ...
def read_memory(memory: int, num_bytes: int) -> int: ...  # once, by all threads; the exclusive or of its 8-byte words

# instruction sets that this processor has kernels for, the best last ("wide" and "amxemulated" are for tests)
def variants() -> list[str]: ...
def known_variants() -> list[tuple[str, bool, bool]]: ...  # all of them: name, is built, is run by this processor
def candidates() -> list[str]: ...  # of `variants`, without those for tests
def families(variant: str) -> dict[str, str]: ...  # of each part: variants with the same text give the same bits
def variant() -> str: ...  # the one in use, but for the parts that were taken from others
def variant_of(part: str) -> str: ...
def has_paired_products() -> bool: ...  # attention over narrow keys and values rounds queries and weights to bfloat16
def select(name: str) -> bool: ...  # all parts; False: no such variant here
def select_part(part: str, name: str) -> bool: ...  # a linear's kind of weights, or "attention"
def units(variant: str) -> list[str]: ...  # what multiplies there, such as "float32 FMA"
def run_unit(variant: str, unit: str, turns: int) -> int: ...  # on all threads, from registers; the number of operations

# See native/sampling.h; workers/sampling/sampler.py is the caller.
def sample(
    logits: int,
    vocab_size: int,
    num_rows: int,
    token_ids: int,
    logprobs: int,
    ranks: int,
    num_top: int,
    top_token_ids: int,
    top_logprobs: int,
    samplings: int,  # of slots, as in workers/sampling/slot_sampling.py
    histories: int,  # int32 [slots, width]
    width: int,
    num_prompt_tokens: int,
    slots: int,
    positions: int,
) -> None: ...
def score(
    logits: int,
    vocab_size: int,
    num_rows: int,
    token_ids: int,
    logprobs: int,
    ranks: int,
    num_top: int,
    top_token_ids: int,
    top_logprobs: int,
) -> None: ...
def philox4x32(counter: list[int], key: list[int]) -> list[int]: ...  # four 32-bit words for a counter of four, a key of two
def uniform(seed: int, position: int, sample_index: int, purpose: int = 0) -> float: ...  # u64, u32, ... -> [0, 1)

class Tape:
    def __init__(self, ops: list[Op], pairs: list[int]) -> None: ...
    def replay(self) -> None: ...
    def replay_range(self, begin: int, end: int) -> None: ...
    def replay_timed(self) -> None: ...  # also keeps what each op took
    # each op cut up as for so many threads and done by the caller alone: its jobs, of each the nanoseconds of its tasks; the
    # last job is what is not in tasks
    def replay_alone(self, num_threads: int) -> list[list[list[int]]]: ...
    @property
    def times_ns(self) -> list[int]: ...

def address(array: np.ndarray | bytes) -> int: ...
def find_ends(
    slots: int, positions: int, token_ids: int, count: int, samplings: int, num_prompt_tokens: int, is_ended: int
) -> None: ...
def follow(
    slots: int,
    count: int,
    are_following: int,
    starts: int,
    counts: int,
    num_sampled: int,
    granted: int,
    num_tokens: int,
    max_total_tokens: int,
) -> None: ...
def put_drafts(
    slots: int,
    count: int,
    num_drafts: int,
    counts: int,
    num_sampled: int,
    num_tokens: int,
    drafts: int,
    k: int,
    token_ids: int,
    width: int,
) -> None: ...
def accept(
    slots: int,
    count: int,
    num_sampled: int,
    num_drafts: int,
    ends: int,
    drawn: int,
    token_ids: int,
    width: int,
    accepted: int,
    counts: int,
) -> None: ...
def choose_draft_tokens(logits: int, num_rows: int, vocab: int) -> list[tuple[int, float]]: ...

class DraftChances:
    NUM_CLASSES: int
    def __init__(self, num_places: int, chances: int) -> None: ...
    @staticmethod
    def class_of(probability: float) -> int: ...
    def learn(self, place: int, which: int, stood: bool) -> None: ...
    def tell(self) -> None: ...

class LayerDrafts:
    def __init__(
        self,
        slots: dict[str, int],
        width: int,
        table_width: int,
        block_size: int,
        hidden_size: int,
        standing: dict[str, int],
        single: dict[str, int],
        max_logit_rows: int,
        k: int,
        chances: int,
        least_chance: int,
    ) -> None: ...
    def set_tapes(self, store: Tape, modules: list[tuple[Tape, Tape, int, int, int]]) -> None: ...
    def clear_tapes(self) -> None: ...
    def begin(self, slots: int, starts: int, counts: int, num_sampled: int, num_drafts: int, count: int) -> None: ...
    def empty(self, slots: int, blocks: int, count: int) -> None: ...
    def choose(
        self,
        slots: int,
        starts: int,
        counts: int,
        num_sampled: int,
        num_drafts: int,
        count: int,
        is_wanted: int,
        is_drafting: int,
    ) -> None: ...
    def propose(self, slots: int, count: int, limits: int, k: int, counts: int, classes: int) -> None: ...
    def enter(self, slots: int, count: int, begins: int, ends: int, first_entries: int) -> None: ...
    def mark(self, slots: int, count: int, begins: int, ends: int) -> None: ...
    def draft(self, slots: int, starts: int, counts: int, num_sampled: int, num_drafts: int, count: int) -> None: ...
    def keep(
        self,
        slots: int,
        starts: int,
        counts: int,
        num_sampled: int,
        num_drafts: int,
        count: int,
        num_tokens: int,
        is_drafting: int,
        kept_ends: int,
        hidden: int,
    ) -> tuple[list[int], list[int], list[int], list[int]]: ...

class DraftSlots:
    def __init__(self, token_ids: int, width: int, num_tokens: int, states: int) -> None: ...

class NgramDrafts:
    NUM_CLASSES: int
    def __init__(self, num_states: int, min_tokens: int, max_tokens: int, slots: DraftSlots) -> None: ...
    def start(self, state: int, num_prompt_tokens: int, prediction: int, num_predicted: int) -> None: ...
    def known(self, slots: int, count: int) -> None: ...
    def propose(self, slots: int, count: int, limits: int, k: int, drafts: int, counts: int, classes: int) -> None: ...
    @property
    def num_bytes(self) -> int: ...

class SuffixDrafts:
    NUM_CLASSES: int
    def __init__(
        self,
        num_states: int,
        depth: int,
        max_texts: int,
        max_bytes: int,
        max_factor: float,
        min_chance: float,
        slots: DraftSlots,
    ) -> None: ...
    def start(self, state: int, num_prompt_tokens: int) -> None: ...
    def stop(self, state: int, tokens: int, num_tokens: int) -> None: ...
    def forget(self) -> None: ...
    def known(self, slots: int, count: int) -> None: ...
    def propose(self, slots: int, count: int, limits: int, k: int, drafts: int, counts: int, classes: int) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_texts(self) -> int: ...

class StepTimes:
    def __init__(self) -> None: ...
    def learn(self, has_prompts: bool, has_drafts: bool, num_rows: int, step_ns: float) -> None: ...
    def of(self, has_prompts: bool, has_drafts: bool, num_rows: int) -> float: ...
    def num_plain_since(self, num_rows: int) -> int: ...

class DraftLengths:
    def __init__(
        self,
        priors: list[float],
        first_classes: list[int],
        are_layers: list[int],
        is_adaptive: bool,
        k: int,
        drafts: int,
        classes: int,
        chances: int,
        num_drafts: int,
        trusts: int,
        num_methods: int,
        num_rested: int,
        pauses: int,
        is_drafted_by_layers: int,
        is_ended: int,
    ) -> None: ...
    def clear(self, slots: int, count: int) -> None: ...
    def offer(self, slots: int, count: int, drafts: int, counts: int, classes: int, first_class: int) -> None: ...
    def choose(self, slots: int, count: int, granted: int, num_rows: int, num_sampled: int, chosen: int) -> None: ...
    def learn(self, slots: int, count: int, num_drafts: int, counts: int) -> None: ...
    def wanted(self, slots: int, count: int, wanted: int) -> None: ...
    def num_idle(self, slots: int, count: int) -> int: ...
    def tell_layers(self, slots: int, count: int) -> None: ...
    @property
    def num_verified(self) -> list[int]: ...
    @property
    def least_chance(self) -> float: ...
    def wanted_by_new_requests(self) -> int: ...
    def took(self, has_prompts: bool, has_drafts: bool, num_rows: int, step_ns: float, num_steps: int) -> None: ...
