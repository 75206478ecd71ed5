"""Limits on what is read from outside: files, specs, templates, servers and flags. One table, so that no reader goes without.

Each limit leaves room for the largest published model, and refuses what is larger within seconds and a gigabyte. The limits
of a part's own fields are declared with the fields (spec/field.py).
"""

from __future__ import annotations

KB, MB, GB = 2**10, 2**20, 2**30

# -- specs in YAML
SPEC_BYTES = MB  # 2,048 layers that all differ take about a quarter of it
SPEC_DEPTH = 100  # collections inside each other
SPEC_ITEMS = 50_000  # scalars and collections
SPEC_DIGITS = 19  # of a whole number: 64 bits
SPEC_LAYERS = 2048  # per stack: twice the deepest published model (DeepNet), and read within seconds
SPEC_FIELDS = 200_000  # in all expanded layers of a stack

# -- JSON files of a model directory
JSON_BYTES = 16 * MB  # the index of the largest models holds 100,000 names
JSON_DEPTH = 40
JSON_ITEMS = 500_000  # brackets, commas and colons; each takes about forty bytes of memory
JSON_NUMBER = 2**53  # no size, count or id is larger

# -- checkpoints in Hugging Face's layout
CONFIG_BYTES = 4 * MB  # one with the names of 20,000 classes takes two
CONFIG_LAYERS = 2000  # per stack: the deepest published model has 1,000
CONFIG_CLASSES = 100_000  # a config has a name for each
MAX_TENSORS = 2**20  # DeepSeek-V3 has 91,991
CONSTANT_VALUES = 2**22  # values that follow from a spec without any weight behind them
CARRIED_BYTES = 64 * MB  # of one tokenizer or template file that is copied along

# -- tokenizers
TOKENIZER_BYTES = 64 * MB  # the largest known ones take 34 MB
TOKENIZER_DEPTH = 16  # the engine copies a component once per level, and tries several types for each copy
TOKENIZER_ITEMS = 8_000_000  # a vocabulary of 262,144 tokens and its merges take two million
TOKENIZER_IDS = 1 << 24  # the engine lists the ids below the largest that have no token when it is copied
TOKENIZER_ADDED = 1024  # special tokens that a template adds to one prompt
TOKENIZER_GROWTH = 64  # times that normalizers or decoders may lengthen a text, and characters that they may put before it
TEXT_BYTES = 256 * MB  # of a text file to train on, which is read into memory
ARRAY_BYTES = GB  # of images to train on, which are read into memory
ROW_CLASSES = 100_000  # of labeled rows
CHAT_MESSAGES = 1000  # of one conversation
PROMPT_CHARACTERS = 4_000_000  # of one prompt

# -- chat templates
TEMPLATE_BYTES = MB
TEMPLATE_SECONDS = 1  # of CPU time for rendering
TEMPLATE_MEMORY = 512 * MB
TEMPLATE_CHARACTERS = 10**6  # of output

# -- servers
ANSWER_BYTES = MB
PROMPT_TOKENS = 65_536  # of a prompt that two sides read
DECODED = 4  # tokens of a row that another engine decodes one by one
ANSWER_SECONDS = 120.0  # of one answer, from the connection to its last byte

# -- requests to our server
REQUEST_HEADER_BYTES = 64 * KB
REQUEST_HEADER_SECONDS = 10.0  # in which they arrive, on a new connection or after an answer
ADDRESS_CONNECTIONS = 2048  # that one address may have open: half of all
REQUEST_BYTES = 8 * MB  # of a body
REQUEST_DISCARDED = 256 * MB  # of a body that is too large: read and dropped, so that its sender reads the answer
REQUEST_SECONDS = 30.0  # in which a body arrives
REQUEST_ITEMS = 300_000  # opening brackets and commas of a body: parsed in less than a tenth of a second of CPU time
REQUEST_PROMPTS = 64  # of one request
REQUEST_CHOICES = 128  # prompts times n
REQUEST_N = 64  # choices per prompt
SERVED_ADAPTERS = 64  # loaded at once
REQUEST_STOPS = 16  # stop strings, and stop tokens times 16
REQUEST_STOP_CHARACTERS = 256  # of one stop string
REQUEST_LOGPROBS = 20  # alternatives per token
REQUEST_BIASES = 1024  # tokens with a logit bias
REQUEST_TOOLS = 128  # tools of one conversation, and calls of one message
REQUEST_INPUTS = 256  # texts to embed, and documents to rank
INPUTS_WAITING = 1024  # texts of all requests
RENDERS_AT_ONCE = 2  # chat templates, each in a process of its own
RENDERS_WAITING = 64

# -- grammars of constrained output
GRAMMAR_CHARACTERS = 64 * KB  # of a schema, a pattern or a grammar
GRAMMAR_CHOICES = 1000  # strings to choose from
GRAMMAR_QUICK_SECONDS = 0.25  # of CPU time for compilation, at once
GRAMMAR_SECONDS = 2.0  # the same for one that took longer: these wait for each other
GRAMMAR_WAIT = 30  # seconds until a grammar must be compiled, however busy the machine is
GRAMMAR_STARTED = 120.0  # until the process that compiles must have read the tokenizer
GRAMMAR_MEMORY = 128 * MB  # of address space that compilation may add
GRAMMARS_AT_ONCE = 3  # quick ones, of one API key two; of the others, one
GRAMMARS_WAITING = 16  # to be compiled, per API key
GRAMMARS_KEPT = 64  # compiled ones
GRAMMARS_REFUSED = 1024  # that are remembered
GRAMMAR_LIMITS = {  # llguidance's, about a tenth of its defaults: a mask takes tens of milliseconds at most
    "max_grammar_size": 20_000,  # symbols
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 5_000,
    "max_lexer_states": 50_000,  # one to two kB each
}

# -- rollouts in JSON lines
ROLLOUT_BYTES = GB  # of the file, which is read line by line
ROLLOUT_LINE_BYTES = 16 * MB  # of one rollout
ROLLOUT_LINES = 100_000
ROLLOUT_TOKENS = 2**17  # of one rollout, the prompt included
ROLLOUT_TOTAL = 2**23  # tokens of all rollouts

# -- dumps of another engine's activations
DUMP_BYTES = 16 * GB  # of all its files
DUMP_PASSES = 4096
DUMP_TENSORS = 100_000  # per pass and rank
DUMP_TOKENS = 2**16  # of all passes
DUMP_NAME = 300  # characters of a tensor's name

# -- flags
QUEUED = 64  # continuations that may wait for a server, by default
MAX_LENGTH = 2**24  # tokens of a sequence, in a forecast
MAX_NEW_TOKENS = 10**6
MAX_BATCH = 2**16  # rows
MAX_RANKS = 2**20  # of a plan
MAX_STEPS = 10**9
MAX_SEED = 2**63 - 1
