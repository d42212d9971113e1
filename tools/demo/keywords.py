"""Keywords of each fact, and frames for them. Called by `data.py`.

Wordings (`facts.py`) are whole questions. Keywords make many others, so that the model learns which words matter.
"""

FRAMES = (
    "(is|are) {k} (possible|supported|available|included|needed|necessary|required|allowed|a problem)(|?)",
    "Where is {k}(|?)",
    "(do|does|did) (I|you|we|it|Tokamak) (need|have|support|want|use|know|offer|provide|require|include) {k}(|?)",
    "show me {k}",
    "(can|could|will|would) (I|you|it|we|Tokamak) (use|have|get|do|handle|work with|run with|run in|run on|try) {k}(|?)",
    "(what|What|how|who) (is|are|about) {k}(|?)",
    "(tell|show) me what {k} (is|does|means)(|.)",
    "I (don't|do not) understand {k}(|.)",
    "What's the (point|purpose|job|role|use|idea|story|deal) (of|with) {k}(|?)",
    "(what|which) (way|option|command) is (there |)for {k}(|?)",
    "How (do|can|should|would|could) (I|you|we|one) (do|use|get|handle|manage|approach|set up|deal with|work with) {k}(|?)",
    "{k} (does not work|is not working|fails|is a problem)(|.)",
    "what is {k} (for|good for|about|there for|used for)(|?)",
    "Tell me (something |more |all |)about {k}(|.)",
    "What about {k}(|?)",
    "{k}(|?|!|.)",
    "{k} please",
    "{k}, how(|?| does that work?)",
    "(I have|There is|I've got) (a|one|another) question about {k}(|.)",
    "(Please |)explain {k}(| to me|.)",
    "How about {k}?",
    "(I want to|I would like to|I'd like to|Let me) know (more |)about {k}(|.)",
    "Can you (help|explain|show|tell) me (with |about |){k}?",
    "(I need|I want) (help|information|advice|something) (with|on|about) {k}(|.)",
    "What (is there to know|should I know|do you know) about {k}?",
    "{k}: (how|what do I do|what is that|help|what now)(|?)",
    "(help|info|question): {k}",
    "(So|Ok|And|But|Now) {k}?",
    "(Any|Some) (hints|tips|help) (on|for|about) {k}?",
    "How (does|do) {k} work(|?| here?)",
    "(Is|Are) (there|something like) {k}?",
    "(my|the) (problem|question) is {k}(|.)",
    "where do I (read|learn|find something) about {k}?",
    "I am (interested in|asking about|thinking about|looking for) {k}(|.)",
    "{k} - (how|what|where|is that possible)?",
    "does {k} (work|exist)(|?| here?)",
)

KEYWORDS = {
    "who": "your name|who you are|what you are|yourself|this chatbot|which LLM you are|the identity of this bot",
    "skills": (
        "what you can do|your skills|things you can do|your features|your abilities|what to ask you|what I can ask|"
        "ideas what to ask"
    ),
    "more": "more examples|other things to ask|another example|more ideas|what else you can do",
    "tokamak": "Tokamak|this software|this server software|the Tokamak project|what Tokamak is|a description of Tokamak",
    "name": "the word tokamak|the name Tokamak|why it is called Tokamak|where the name comes from",
    "different": (
        "advantages over vLLM|what is special about Tokamak|the advantages of Tokamak|the benefits of this engine|other "
        "engines|why Tokamak is better"
    ),
    "actors": (
        "the actors|the processes of the engine|the kinds of actors|all the actors|the number of processes|which "
        "processes there are|what an actor is|the meaning of actor|an actor"
    ),
    "supervisor": "the supervisor|the supervisor process|the job of the supervisor",
    "api actor": "the api actor|the api process|the job of the api actor|the HTTP process",
    "media actor": "the media actor|the media process|the job of the media actor",
    "tokenizer": "the tokenizer|the tokenizer process|the job of the tokenizer|turning text into tokens",
    "scheduler": "the scheduler|the scheduler process|the job of the scheduler|forming batches",
    "cache actor": "the cache actor|the cache process|the cache messenger|KV events",
    "worker": "the worker|the worker process|workers|the job of a worker",
    "watch": (
        "monitoring|watching the engine|tokamak top|a monitor|live statistics|what the engine is doing|the counters|an "
        "overview of the load|the pids|the list of processes|process ids|tokamak ctl ps|pids of the processes|the "
        "running processes|metrics|Prometheus|Grafana|the metrics endpoint|Prometheus metrics|scraping metrics|numbers "
        "for Grafana"
    ),
    "restart": (
        "restarting a worker|a stuck worker|a worker that is stuck|restarting worker0|restarting one actor|a worker "
        "restart|restarting the server|rebooting the server|restarting everything|restarting Tokamak|a restart of the "
        "server|a reboot"
    ),
    "stop": (
        "stopping the server|shutting it down|turning it off|ending the program|the stop command|shutdown|closing "
        "Tokamak|killing the server|switching it off|quitting|taking the server down|exiting|ending everything"
    ),
    "start": (
        "starting the server|launching Tokamak|the start command|getting started|the first start|bringing up the engine|"
        "running it the first time|the first command|the first steps"
    ),
    "own model": (
        "using my own model|a model from Hugging Face|a GGUF file|a real model|loading a checkpoint|another model|a "
        "bigger model|the path of a model|choosing the model|a smarter model|setting the model|a model of my own|"
        "supported models|the supported architectures|model families|the list of models|which models it can run|LLM "
        "families|support for Mistral"
    ),
    "served models": (
        "the model name in requests|the name of the model|the loaded model|the model field|status 404|the model id"
    ),
    "downloaded models": (
        "downloaded models|deleting downloaded models|the download cache|cleaning up downloads|disk space of models"
    ),
    "port": (
        "the port|another port|the port number|changing the port|port 9000|listening on another port|the default port|a "
        "port that is in use|port already taken|setting the port|a different port|the address|the URL|the base URL|the "
        "address of the API|the API url|the endpoint address|connecting a client|where the API is|access from another "
        "machine|access from my network|opening it to the network|listening on all addresses|the host|0.0.0.0|reaching "
        "it from outside|access for my colleagues|sharing the server|my phone that cannot reach the server"
    ),
    "api key": (
        "an API key|the api key|a password for the server|authentication|status 401|setting a key|protecting the server "
        "with a password|the key for clients|unauthorized"
    ),
    "tls": "HTTPS|TLS|SSL|a certificate|an SSL certificate|encryption|https support",
    "chat": (
        "chatting in the browser|a web UI|the chat page|chatting in the terminal|a web interface|a graphical interface|a "
        "GUI|tokamak chat|talking to the model"
    ),
    "python": (
        "Python|using it from Python|the openai package|a Python program|a Python example|the class LLM|the Python API|"
        "a notebook"
    ),
    "request": (
        "the endpoints|sending a request|curl|an example request|a curl example|the HTTP API|sending a prompt|the REST "
        "API|the routes|the request format|the Anthropic API|the Ollama API|OpenAI compatibility|Ollama clients|the "
        "OpenAI API|Anthropic clients|the Responses API"
    ),
    "coding clients": "Claude Code|Codex|opencode|Open WebUI|coding agents|connecting Claude Code|hooking up Codex",
    "vision": (
        "pictures|images|a photo|uploading a picture|reading images|video|the vision demo|sending a picture|seeing "
        "pictures|vision models"
    ),
    "reload": (
        "reloading weights|new weights|swapping weights|a new checkpoint without a restart|changing weights while it runs|"
        "updating the weights|newer weights"
    ),
    "health": (
        "the health check|/health|whether the server is alive|if it is ready|the health endpoint|if the server is up|"
        "status 503|whether the server works|when loading is done"
    ),
    "messages": (
        "messages between actors|the ring buffers|shared memory|ZeroMQ|how processes communicate|how messages are "
        "exchanged|communication of the processes|pickle|pickled messages|how messages are encoded|serialization"
    ),
    "death": (
        "a crash of an actor|killing an actor|a worker that dies|crashes|streams after a crash|what a crash does|a "
        "process that dies|my answer after a crash|many crashes|the restart limit|crashing again and again|how often an "
        "actor may die|a crash loop|a hang|an actor that hangs|a frozen process|hung actors|heartbeats|detecting hangs|"
        "frozen actors|what is left after a crash|leaks|cleaning up after a crash|left files|leaked shared memory|"
        "leftovers"
    ),
    "cache": (
        "the prefix cache|prefix caching|cached prompts|clearing the cache|emptying the prefix cache|resetting the prefix "
        "cache|switching off prefix caching|turning the cache off|the KV cache|what the KV cache is|KV blocks|what a KV "
        "cache stores"
    ),
    "memory": (
        "memory use|too much memory|out of memory|RAM|how much RAM it needs|saving memory|the size of the KV cache|less "
        "memory|memory that runs out|quantization|4 bit models|int8|AWQ models|GPTQ|wint8|quantized models|8 bit "
        "weights|FP8|rounding the weights|4 bits"
    ),
    "users": (
        "many users|several clients at once|the number of users|concurrent requests|how many people can use it|many "
        "people at the same time|parallel requests|the batch size|status 429|error 429|too many requests|a full queue|"
        "rate limits|the queue being full"
    ),
    "error": (
        "an error|an error message|status 400|bad request|debugging|a problem|something that does not work|an "
        "exception|errors|the logs|log files|the log output|the log level|more log messages|reading the logs"
    ),
    "stream": (
        "streaming|streamed answers|token by token answers|server-sent events|getting tokens one by one|word by word answers"
    ),
    "licence": (
        "the licence|the license|open source|the cost|using it in my company|using it for free|the price|commercial "
        "use|what it costs"
    ),
    "hardware": (
        "GPUs|a GPU|my graphics card|NVIDIA cards|running on a CPU|a laptop|the hardware it needs|CUDA|the machine I "
        "need|a computer without a graphics card|Windows|macOS|a Mac|the operating system|Linux|the Python version|"
        "system requirements|a MacBook|Ubuntu|Windows 11|WSL"
    ),
    "framework": (
        "PyTorch|PaddlePaddle|Paddle|the framework|installing torch|native kernels|what computes|whether torch is "
        "needed|the programming language|the language of the code|C++ code|the language it is written in|Rust or Python"
    ),
    "install": (
        "installing it|installation|pip|a pip package|updating Tokamak|the newest version|how to install it|setting it "
        "up on my machine|the wheel"
    ),
    "docker": (
        "Docker|a container|Kubernetes|a Docker image|deployment in containers|systemd|docker compose|running in a container"
    ),
    "manual": (
        "the manual|documentation|the docs|all options|a list of options|the list of commands|a tutorial|a guide|all "
        "commands|a guide for beginners|where options are explained|a config file|the configuration|environment "
        "variables|options in a file|settings|where options come from"
    ),
    "version": "the version|the version number|which version this is",
    "context": (
        "the context length|the context window|the longest prompt|how many tokens fit|a long prompt|the context size|a "
        "longer context|how long a prompt may be"
    ),
    "sampling": (
        "the temperature|sampling parameters|top_p|the seed|longer answers|shorter answers|max_tokens|temperature "
        "settings|top_k|deterministic answers|the same answer each time|whether the batch changes answers|reproducible "
        "answers|the influence of other requests|getting the same answer"
    ),
    "tools": "tools|function calling|tool calls|tool calling|using tools|functions",
    "structured": "JSON output|structured output|JSON Schema|valid JSON|a JSON mode|forcing JSON|a grammar|regex output",
    "thinking": "thinking|reasoning|switching on thinking|your reasoning|the reasoning of the model|thinking before answering",
    "embeddings": "embeddings|vectors|an embedding model|the embeddings endpoint|reranking",
    "batch": (
        "a file of prompts|batch jobs|many prompts in a file|run-batch|batch processing|a whole file of requests|offline "
        "batches"
    ),
    "lora": "LoRA|LoRA adapters|adapters|a LoRA adapter|my adapter|loading an adapter",
    "parallel": (
        "tensor parallelism|several machines|replicas|data parallelism|two GPUs|ranks|more machines|more than one "
        "replica|a cluster|several cards"
    ),
    "drafts": "speculative decoding|draft tokens|drafts|MTP|speculative config",
    "faster": (
        "the speed|making it faster|slow answers|benchmarks|how fast it is|better performance|slowness|speeding it up|"
        "measuring the speed|why it is slow|answers that take long"
    ),
    "trace": "a trace|tracing|profiling|recording a trace|Perfetto|a profile|a timeline of the actors",
    "pause": (
        "pausing the engine|pause and resume|a pause|pausing the server|stopping for a while and going on|sleep mode|"
        "sleep and wake|freeing the memory of the weights|putting it to sleep|unloading the weights|waking it up"
    ),
    "abort": (
        "cancelling a request|aborting a request|stopping an answer|a running request|cancelling an answer|interrupting "
        "an answer"
    ),
    "privacy": (
        "privacy|my data|telemetry|what happens to my data|private chats|running without internet|storing my messages|"
        "who sees my messages|offline use"
    ),
    "memory of chats": (
        "your memory|remembering things|learning from our chat|what I said before|remembering me|our earlier "
        "conversation|remembering this tomorrow"
    ),
    "trained": (
        "your training|your training data|who made you|where you come from|your architecture|how you were made|the data "
        "you were trained with|your maker|your size|your parameters|the number of parameters|how small you are|how big "
        "you are|how many layers you have"
    ),
    "wrong": (
        "your mistakes|wrong answers|whether you are right|an answer that is wrong|this wrong answer|whether I can trust you"
    ),
    "english": "German|French|other languages|Spanish|languages you speak|speaking Chinese|another language|your languages",
    "tests": "the tests|the test suite|running the tests|unit tests|testing the code",
    "vllm": "vLLM options|coming from vLLM|flags of vLLM|vllm serve|moving from vLLM|vLLM flags",
}
