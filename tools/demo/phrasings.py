"""More wordings for `facts.py` and `small_talk.py`, as people type them. Called by `fact.py` and `data.py`.

Each line is a topic, a colon, and questions separated by semicolons, without final punctuation; they are patterns, too.
"""

_LINES = """
who: who am I speaking with; what should I call you; and you are; is there a human behind this; are you some kind of
    AI; which assistant is this; what model did I just start; what model is running; is this gpt; am I chatting with a
    bot; who is answering me; what are you called; tell me your name; so what are you; what is tokamak-demo; are you a
    program; is this thing a real AI; are you alive; can you introduce yourself; which AI model are you; name of this
    model; are you a machine or a person; what version of gpt are you; who is on the other side; are you like chatgpt;
    you are a bot, right; what LLM do you use; are you an open source model; what is your model name; hey what are
    you; do you have a name; whats ur name; (r|are) u (real|human|a bot|an ai); identify yourself; who r u
skills: what are you able to do; what can I do here; what could I ask you; what sort of questions can you answer; show
    me some things you can do; what do you understand; I don't know what to ask; what tasks can you handle; are you
    good at anything; can you do math; can you do sums; can you calculate; how can I use you; what is possible with
    you; what are you made to do; what might I ask; give me some examples; some example questions please; where do I
    start with you; what should I ask first; any suggestions what to ask; can you be useful; help me out; i need some
    help; how does this work; how do you work; what works; how to talk to you; what features do you have; your
    capabilities please; list what you can do; what topics do you know; what are your limits; can you assist me; can
    you solve problems; what will you do for me; show off a bit; surprise me; how do I begin; help a newbie; what do
    people ask you; (wat|what) can (u|you) do; are you helpful; tell me what you know; what kind of help do you give;
    let me see what you can do; demonstrate something; do something for me; what does this bot do; what is your
    purpose
more: what else can I try; any other examples; show me more; and what more; more ideas; tell me another thing; got
    more; anything more; something else to try; other things; what else could I ask; more suggestions; another idea
    please; other questions I could ask; what other examples are there; and besides that; next example; give me one
    more idea; is there more; keep going; what can I ask now; what should I ask next; what else do you offer; do you
    have more examples; different example please
tokamak: what does tokamak do; tell me about tokamak; what's tokamak for; describe tokamak in a sentence; what is the
    tokamak project; is tokamak an inference server; explain this software; what software is this; what is this engine
    all about; what am I running here; what did I just install; what's this program about; summary of tokamak; tokamak
    in a nutshell; give me an overview; what does this server do; what is behind this; so tokamak is what; introduce
    tokamak; what does the engine do; why does tokamak exist; what kind of software is it; what is it that serves you;
    which server runs you; what problem does tokamak solve; is tokamak a framework; can you tell me what tokamak means
    as a product; who is tokamak for
name: why that name; what's a tokamak; meaning of the name; why call it tokamak; is tokamak a fusion reactor; what has
    plasma to do with this; tokamak like in fusion; where is the name from; the name is strange, why; how did it get
    its name; what does tokamak stand for; is the name russian; who came up with the name; explain the name; origin of
    the word; isn't a tokamak a reactor; what has this to do with fusion
different: how does it differ from vllm; compare it with vllm; compare it to ollama; tokamak or vllm; tokamak vs
    ollama; tokamak versus llama.cpp; why not just use ollama; why would I pick this engine; what is so special here;
    what's better here; main advantages; key features of tokamak; selling points; what's new about it; any reason to
    use it instead of vllm; what sets it apart; is it better than ollama; what do I gain with tokamak; pros of
    tokamak; strengths of the engine; why another inference engine; what are its promises; what does it guarantee; how
    is it unlike the others; benefits over sglang; what is the big idea; what can it do better
actors: what processes are there; what actors exist; list the actors; name all actors; how many actors; how many
    processes does it start; which parts does the engine have; how is the engine organised; architecture of tokamak;
    how is it built inside; explain the architecture; components of the engine; structure of the engine; what is an
    actor; explain actors; what do you call an actor; is an actor a thread; actor meaning; why actors; what does
    actor-based mean; which kinds of processes run; tell me all actor names; show the architecture; what is inside the
    engine; why does it start so many processes; how many parts does it have; what does the engine consist of;
    overview of the processes
supervisor: what is the supervisor; what does the supervisor do; job of the supervisor; why is there a supervisor; who
    starts the actors; who watches the processes; who restarts dead processes; which process is the parent; explain
    the supervisor process; purpose of the supervisor; who cleans up at the end; who notices that an actor died; role
    of the supervisor; what happens in the supervisor; which actor starts the others
api actor: what is the api actor; what does the api actor do; job of the api actor; which process speaks http; who
    accepts the requests; which actor handles the http connections; purpose of the api process; what is the api
    process; explain the api actor; who talks to clients; who keeps the open requests; role of the api; which actor is
    the web server; where do requests arrive first
media actor: what is the media actor; what does the media actor do; who decodes the images; job of the media actor;
    which process reads the pictures; purpose of the media process; explain media; when does the media actor run; why
    is there a media actor; who handles video; role of the media actor; which actor decodes video; where are pictures
    decoded
tokenizer: what is the tokenizer; what does the tokenizer do; job of the tokenizer; who makes the tokens; who turns
    text into tokens; where is the chat template applied; why is there a tokenizer; explain the tokenizer process;
    purpose of the tokenizer; who turns tokens back into text; role of the tokenizer; which actor tokenizes; who
    renders the prompt; what does tokenizing mean; which process detokenizes
scheduler: what is the scheduler; what does the scheduler do; job of the scheduler; who decides which request runs;
    who makes the batch; which actor owns the queue; purpose of the scheduler; explain the scheduler process; role of
    the scheduler; who puts requests together; which process plans the steps; who owns the block tables; where are
    requests queued; who decides what is computed next; what does scheduling mean here
cache actor: what is the cache actor; what does the cache actor do; job of the cache process; who owns the kv memory;
    which actor holds the kv cache; why is there a cache actor; explain the cache process; purpose of the cache actor;
    who publishes kv events; role of the cache actor; what are kv events; why does the cache outlive the workers;
    cache messenger, what is that
worker: what is a worker; what does a worker do; job of the worker; who computes the model; who holds the weights;
    which process runs the model; purpose of a worker; explain the worker process; role of the worker; who samples the
    tokens; where is the model computed; what do workers do; which actor makes the tokens; where are the weights; what
    is worker0
watch: how do I see what it is doing; how can I monitor it; is there a dashboard; live view of the engine; which tool
    shows the load; see the statistics; how busy is the server; how many requests are running; show me the counters;
    where can I see throughput; list the running processes; how to see the pids; what is the pid of the worker; which
    actors are alive; show process list; see if everything is running; tokamak top, what is it; tokamak ctl ps what
    does it show; like top for tokamak; prometheus endpoint; do you export metrics; grafana dashboard; how do I scrape
    it; where are the metrics; is there monitoring; check the state of the actors; how many times was it restarted;
    see tokens per second; how do I observe the engine; status of the processes; look inside the engine; which command
    lists processes; monitoring with prometheus; measure the load; show me what is happening; overview of the running
    engine; how do I watch requests; get numbers for monitoring; inspect the running engine; usage statistics of the
    server; how do I view the actors; process ids please; are all actors up
restart: restart the server; how do I restart; restart everything; reboot it; restart a worker; the worker is stuck;
    one process hangs, how do I restart it; restart only the scheduler; how do I restart worker0; bounce the server;
    stop it and start it again; relaunch tokamak; kick a stuck worker; how do I reset the server; restart tokamak
    please; I changed an option, how do I restart; do I need to restart it; restart one actor without losing streams;
    which command restarts a process; restart the engine completely; can I restart a single process; turn it off and
    on again; how to do a restart
stop: how do I stop it; how to quit; how to exit; shut it down; turn it off; kill the server; end it; close the
    program; which command stops it; how do I terminate tokamak; how can I stop this; I want to stop; I want to quit;
    make it stop; how do I switch it off; how to stop the running server; the way to stop the engine; please stop the
    server; can you stop; how do I leave; stop everything; end the engine; how can I finish; quit tokamak; how do I
    shut it down properly; is ctrl+c fine to stop; what is the command to stop; how to end the server; take it down;
    bring the server down; close tokamak; end this; turn the server off; terminate the process; clean shutdown; stop
    all actors; how do I halt it; I am finished, how do I close it; tokamak ctl stop
start: how do I start it; start the server; how to launch it; how do I run tokamak; which command starts it; how to
    begin with tokamak; turn it on; bring it up; get it running; how do I boot the server; starting for the first
    time; first steps with tokamak; what do I run first; I want to start tokamak; how do I get started; quick start;
    what is tokamak serve; how do I run the engine; I have a checkout, how do I run it; run it from the source; the
    server is not running, how do I start it; it is off, how can I switch it on; launch the engine; start up command;
    how do I serve this demo; open the server; start everything up; run the demo; how do I start this model; how do I
    fire it up; what is tools/serve; start you again tomorrow
own model: how do I use another model; how do I load my model; serve my own model; can I use a hugging face model; use
    a model from the hub; load a gguf; how do I run llama; how to serve qwen; can I run mistral; does it support
    gemma; which models are supported; which architectures work; what models can I use; list of supported models; how
    do I choose a model; replace you with a bigger model; how to get a smarter model; run a real llm; where do I put
    the model path; model path option; what is --model; load a checkpoint from disk; how do I download a model; use a
    local model; a model from a folder; I have a safetensors model; change the model; switch to another model; run a
    7b model; can it run deepseek; does it serve qwen3; which llms can tokamak serve; is phi supported; I want a
    better model; how do I serve something else than you; can I bring my own weights; try a different model; point it
    to my model; supported model families; what formats of models does it read; does it read gguf; select the model to
    serve; use my fine-tuned model; how to run a larger LLM; models from huggingface; put in another brain
served models: what is loaded right now; which model name do I send; what do I put in the model field; model not
    found, why; I get 404 for the model; list the loaded models; which model is served; what is the model id; name of
    the model in requests; the request wants a model name; how do I list models over http; which models are available
    on the server; show the served models; what does /v1/models give; unknown model error
downloaded models: where are downloaded models; delete a downloaded model; clean the model cache; how much disk do the
    models take; remove old models; list downloaded models; free disk space; what did I download; tokamak models rm;
    which models are on my disk; clear the downloads; how do I get rid of downloaded weights; my disk is full of
    models; see the size of the downloads; where are the weights stored
port: change the port; how do I set the port; use another port; port is in use; port 8000 is taken; listen on a
    different port; which port do you use; what port is it on; default port; run on port 80; set port number; what is
    the url; what is the address; base url; where is the api; which url do I call; where does it listen; endpoint of
    the server; connect from another computer; reach it from my phone; reach it over the network; my colleague can't
    connect; open it to the lan; access from outside; listen on all interfaces; bind to 0.0.0.0; what is --host; what
    is --port; expose the server; make it public; where do I find the server; host and port; address already in use;
    connection refused from another machine; only localhost works; how do I connect a client; which host is it on; can
    others use my server; use it from my laptop; put it on port 5000; other port please; api address; set the host;
    remote access; two servers on one machine need different ports; share it with my team; server url; ip address of
    the server; allow other machines; use it in the local network; where can I reach the api
api key: set a password; protect the server; do I need a key; which api key; what key do I enter; why 401;
    unauthorized, what now; require a key; add authentication; secure the api with a key; where do I set the api key;
    what is --api-key; clients need a token; how do clients log in; is a key required; who may use the server; lock
    the server; no access without a password; change the key; authorization header; bearer token; how do I keep
    strangers out; login for the api; add a secret; my key is not accepted
tls: https; use https; how do I enable ssl; add a certificate; encrypt the connection; serve over tls; certificate
    file option; is https supported; self-signed certificate; secure connection; turn on encryption; how do I serve
    with https; what is --ssl-certfile; private key file; make the connection encrypted; let's encrypt certificate
chat: chat with you; is there a web page; open a chat; is there a ui; is there a user interface; chat in my browser;
    talk to you in the terminal; graphical interface; web interface; where is the chat page; how do I talk to the
    model; is there a playground; tokamak chat; a window to chat; chat without code; can I open you in firefox; where
    do I type my questions; chat on the command line; is there an app; frontend for it; how do I get a chat window;
    command line chat; does it come with a web ui; nice interface for chatting; where is the page; which page do I
    open
python: use it from python; python example; call you from a script; is there a python api; use the openai library;
    offline in python; python client; which python package; import tokamak; the LLM class; from a notebook; jupyter;
    without a server from python; example code in python; use it in my program; write a script that asks you; sdk; a
    client library; can my code talk to you; langchain; call it in code; python code to send a prompt; how do I use
    the openai package with it
request: send a request; curl example; how do I call the api; which endpoints are there; http request; what do I post;
    rest api; which routes exist; is it openai compatible; does it speak the anthropic api; ollama api; use my ollama
    client; messages api; responses api; what apis do you have; call it over http; post a prompt; example request;
    format of a request; json to send; which apis are supported; can I use it like openai; which url for chat
    completions; does it work with openai clients; chat completions route; list the endpoints; show me the api; ask
    you with curl; send a prompt from the shell; what does a request look like; is there an http interface; compatible
    with the openai api; documentation of the routes; replace openai with this
coding clients: use it with claude code; connect codex; opencode settings; open webui; use it in my editor; coding
    assistant; cline; connect an agent; hook it up to claude code; use with vs code; settings for codex; does open
    webui work; agent tools with it; how do I configure claude code; can it power a coding agent; use it as backend
    for opencode; print the client settings
vision: can you see; send you a picture; look at this image; read an image; can I upload a photo; image input;
    understand pictures; is there a vision model; multimodal; what is on this picture; describe a photo; video input;
    vision demo; how do I send an image; are pictures supported; does it do images; ocr; attach a file with a picture;
    show you a screenshot; analyse an image
reload: update the weights; new weights without restart; swap the model weights; reload the checkpoint; hot reload; I
    trained further, how do I load the new weights; replace weights while running; load newer weights; change the
    checkpoint live; refresh the model; tokamak ctl reload; switch weights without downtime; load new version of the
    weights; which weights made the answer
health: is it up; is it ready; health check; are you running; is the server alive; check if it works; how do I know it
    has started; ready probe; liveness probe; what does 503 mean; when is it ready; health endpoint; is the engine ok;
    see whether the server runs; has it loaded; does it still work; how to test if the server is up; service
    unavailable; is everything fine; why is it not ready; how long does loading take
messages: how do the processes talk; how do actors communicate; what is in shared memory; ring buffer; is zeromq used;
    what protocol is between the actors; do you use pickle; is there pickle; how are messages sent; inter process
    communication; serialization of messages; what are the rings; how does data get from one process to another; why
    shared memory; message format; msgspec; sockets between actors; how is text passed between processes
death: what if a worker crashes; what if a process dies; does a crash lose my answer; is it fault tolerant; what if I
    kill an actor; what if it hangs; what if the scheduler crashes; does it recover; what if it crashes all the time;
    restart limit; how often may it crash; what about streams after a crash; crash recovery; self healing; kill -9 a
    worker; what happens on failure; resilience; hang detection; heartbeat; frozen process; does it clean up after a
    crash; left over shared memory; what remains after a crash; is anything lost when it dies; out of memory killer
    killed a worker; will my stream survive; can a crash break my answer; an actor died; the process got killed; does
    it come back by itself; worker keeps crashing; high availability; a process is not responding; what does the
    engine do when something fails; what if the api dies; robust against crashes
cache: what is the kv cache; what is prefix caching; does it cache prompts; clear the cache; empty the cache; reset
    the cache; disable prefix caching; how does the cache work; are prompts reused; same prompt twice; why is the
    second request faster; flush the cache; turn off the cache; what are blocks; what is a kv block; explain the kv
    cache; is there a prompt cache; cache of keys and values; cached tokens; delete cached prompts; reuse of earlier
    prompts; does it remember computed prompts; how are long system prompts handled
memory: how much memory does it need; how much ram; it uses too much memory; out of memory; reduce memory; less ram;
    limit the memory; memory usage; how big is the kv cache; make the weights smaller; quantize a model; 4 bit; 8 bit;
    int4; int8; does it support quantization; awq; gptq; load a quantized model; compress the weights; is fp8
    supported; it does not fit into memory; how many gigabytes; does a 7b model fit; memory for the cache; ram
    requirements; save memory; quantized weights; use int8 weights; shrink the model; the machine runs out of memory;
    the oom killer; wint4; smaller weights; run big models with little memory; bits per weight; lower precision
users: how many users; how many requests at once; concurrent users; several people at the same time; is there a limit
    of requests; batch size; max-num-seqs; too many requests; what is 429; rate limit; queue is full; why do I have to
    wait; requests are rejected; how many clients; parallel requests; can my team use it together; does it batch
    requests; continuous batching; the server is overloaded; it says retry later; retry-after; server busy;
    simultaneous requests; how many chats at once; increase the number of requests; many people ask at once
error: there is an error; I get an error; what does this error mean; error 400; error 500; it does not work; something
    is broken; where are the logs; see the log; log file; more logging; debug output; it failed, why; how do I find
    out what went wrong; bad request; I see a traceback; troubleshooting; read the logs; log level; turn up logging;
    where are errors listed; it crashed, where is the log; problem with the server; my request failed; list of errors;
    what went wrong; how do I debug; it doesn't start; nothing works; an exception; error message; verbose output;
    find the log of a worker; logging options; got a 422
stream: stream the answer; streaming; token by token; get the answer while it is written; server sent events; is
    streaming supported; how do I stream; partial answers; live output; see words as they come; sse; turn on
    streaming; words appear one after another; stream option
licence: what is the licence; is it free; is it open source; can I use it at work; does it cost anything; commercial
    use; may I sell it; which license; apache licence; do I have to pay; price; is it free of charge; may I change the
    code; copyright; can a company use it; how expensive is it; is there a paid version; legal to use; can I fork it;
    terms of use; subscription
hardware: does it need a gpu; run on cpu; does it run on nvidia; cuda; is a gpu supported; amd cards; does it run on
    windows; does it work on a mac; which operating system; linux only; run it on my laptop; hardware requirements;
    system requirements; which python version; apple silicon; raspberry pi; arm; what computer do I need; minimum
    requirements; is windows supported; run on my pc; works without gpu; which processor; do I need a graphics card;
    gpu support; run it on ubuntu; python 3.12; on my old computer; macbook; wsl; can it use my gpu; rtx; tpu; what
    machine is needed; does it run everywhere; on what systems does it run; which platforms; cpu only; intel or amd;
    fedora; debian
framework: is it written in python; programming language; which language is it written in; do I need pytorch; does it
    use torch; what is paddle for; does it use paddlepaddle; which framework; what computes the model; native kernels;
    c++; is it rust; is there cuda code; what is it built on; which libraries; based on torch; which deep learning
    framework; is tensorflow needed; what are the kernels written in; source code language; technology behind it; tech
    stack; is paddle required; what is under the hood
install: install it; how do I install; pip install; setup; build from source; how do I get it; update to the newest
    version; download tokamak; upgrade; package name; installation; is there a wheel; how do I compile it; set it up;
    installation guide; what do I need to install; is it on pypi; uninstall; install on my machine; clone the
    repository; install the requirements; get the newest release; make it run on a new computer
docker: is there a docker image; run in docker; kubernetes; container; deploy it; systemd service; run as a service;
    docker compose; helm; podman; deployment; run it in production; start it at boot; container image; in a cluster
    with kubernetes; how do I deploy; dockerfile; run it in the background as a service; k8s
manual: where is the documentation; is there a manual; read the docs; list all options; all flags; help of the command
    line; tutorial; how do I configure it; config file; environment variables; where are options explained; which
    options are there; settings; options in a file; more information; where can I learn more; documentation please;
    user guide; guide for beginners; set options with the environment; yaml config; list of commands; which commands
    exist; reference; where do I read about tokamak; configuration; configure the server; parameters of the server;
    put my options in a file; show all settings; homepage; website with docs; faq; command line options; explain the
    options; what flags can I use
version: which version; what version is it; version number; show the version; how new is this; which release; check
    the version; what version do I have; is this the newest version; release number; version of the server
context: how long can a prompt be; context length; context window; how many tokens; max tokens of a prompt; my prompt
    is too long; how much text can you read; context size; limit of the prompt; longer context; token limit; increase
    the context; what is --max-model-len; how long may my question be; can I send a long text; can you read a book;
    maximum length; prompt too long error; how big is your context; number of tokens per request
sampling: set the temperature; what is temperature; top_p; seed; more random; more creative; make it deterministic;
    always the same answer; longer answers; shorter answers; max_tokens; sampling parameters; answer is cut off; why
    does it answer the same; limit the length; change the randomness; top k; greedy; are answers reproducible; does
    the batch change my answer; same question, different answer; do other requests influence mine; fix the seed; how
    to get varied answers; repetition; stop tokens; is the output deterministic; the answer ends too early;
    temperature zero; get the same text again; do answers depend on load; control the output; are results repeatable
tools: can you call functions; function calling; use tools; tool use; how do I give you tools; does it support tools;
    call my function; tool calls; do you know tools; plugins; let you call an api; give the model a function; mcp; can
    you use a calculator tool; how are tools passed; agent with tools; tool_choice; enable tool calling; call external
    functions
structured: json output; force json; json mode; structured output; json schema; answer in a fixed format; valid json;
    use a grammar; regex; response_format; only json please; schema for the answer; guided decoding; constrained
    decoding; force a format; get objects instead of text; answers as json; choose from a list of answers; make the
    answer fit a schema; output format
thinking: can you think; reasoning; think before you answer; reasoning model; show your thoughts; turn on thinking;
    chain of thought; do you reason; thinking mode; reasoning effort; think step by step; see what you think; enable
    reasoning; disable thinking; stop thinking; do you think at all; show the reasoning
embeddings: make embeddings; vectors; embed a text; embedding model; rerank; embeddings endpoint; vector of a
    sentence; text similarity; semantic search; rag; score two texts; does it do embeddings; compute vectors;
    classification model; vector database; reranker
batch: process a file; many prompts at once; batch file; run-batch; offline batch; jsonl; a list of questions in a
    file; run a lot of prompts; batch mode; answer a whole file; batch api; thousands of prompts; file with requests;
    process prompts over night; bulk requests; run through a dataset
lora: use lora; lora adapter; load an adapter; fine-tuned adapter; adapters; several loras; is lora supported; add an
    adapter; enable lora; peft; load my lora; unload an adapter; switch adapters; lora weights; serve a fine-tune
parallel: several gpus; two gpus; multiple machines; tensor parallel; data parallel; replicas; scale out; cluster;
    more than one node; split the model; use all cores; multi gpu; use more cards; distributed; run over several
    computers; spread the load; more replicas; multi-node; ranks; split over processes; load balancing; scale to many
    machines; pipeline parallel; shard the model
drafts: speculative decoding; draft model; what are drafts; mtp; multi token prediction; guess tokens ahead; draft
    tokens; turn off drafts; speculation; does it speculate; enable speculative decoding; eagle; ngram drafts; do
    drafts change the answer; what is acceptance
faster: it is slow; make it faster; why so slow; speed it up; how fast is it; benchmark; more speed; tokens per second
    is low; improve performance; tune it; performance tips; latency is high; measure the speed; takes forever; answers
    take too long; throughput; optimise it; run a benchmark; too slow for me; use more threads; how many threads;
    better throughput; quicker answers; load test; how do I get higher speed; tokamak bench; slow responses; it lags
trace: record a trace; profile it; perfetto; timeline; trace a request; profiling; where is time spent in detail; see
    what each actor did; flame graph; tokamak trace; opentelemetry; performance trace; trace file; profiler; analyse a
    slow request
pause: pause it; pause the engine; resume; sleep mode; free the weights; wake it up; unload the model; put it to
    sleep; stop computing for a while; give the memory back; suspend; continue after a pause; sleep and wake; hold all
    requests; release memory while idle; let it sleep; interrupt the engine for some time; unload the weights; pause
    serving; tokamak ctl pause; bring it back from sleep; free ram without stopping
abort: cancel a request; abort my request; stop an answer; stop generating; interrupt the answer; kill a request; end
    a stream; the answer is too long, stop it; cancel generation; abort a running request; how do I cancel; stop a
    single request; request id to abort; disconnect in the middle; make it stop talking
privacy: do you save my data; where does my data go; is it private; do you log what I write; telemetry; does it phone
    home; works offline; without internet; who can see my messages; is my chat stored; tracking; data protection;
    gdpr; is it safe to enter secrets; do you send anything to the cloud; is it local; does it collect data; are my
    prompts logged; are you in the cloud; confidential; is anyone reading this; do you spy on me; does it need the
    internet; are conversations saved; is it secure; can anyone else read my chat
memory of chats: do you remember me; remember this; will you learn from this; do you remember earlier chats; what did
    I ask before; can I teach you; do you learn; forget everything; do you keep my name; long term memory; remember my
    name; can you learn new facts; do you get smarter; what was my first question; do you know me; chat history; what
    did we talk about; do you know what I said; my name is Bob, remember that; do you have memory; can you be trained
    by talking
trained: who built you; how were you trained; what data; where were you trained; training data; your architecture; how
    many parameters; how big are you; how small are you; how many layers; your size; are you qwen; which architecture;
    how long did training take; who is your creator; what are you made of; are you a neural network; when were you
    made; parameter count; what is your knowledge cutoff; are you based on llama; model size; how old are you as a
    model; who trained you; why are you so small; what hardware were you trained on; how were you created; can I train
    you again; number of weights
wrong: that's wrong; you are wrong; that is not correct; are you sure; I don't believe you; bad answer; why do you
    make mistakes; can I trust you; this is nonsense; you made a mistake; is that true; you don't understand me; you
    are dumb; stupid bot; that's not what I asked; check that again; really; no; not true; you are useless; are your
    answers correct; how reliable are you; you misunderstood; false; that can't be; hmm that is wrong; why did you say
    that; are you always right; that was not my question; you didn't answer; that does not help me; you are lying; I
    doubt that; wrong answer; what a stupid answer; do you hallucinate; is this correct; incorrect; that answer is
    bad; how accurate are you; what do you mean; I don't get it
english: do you speak german; do you know french; other languages; which languages do you speak; speak spanish; can
    you answer in italian; only english; is chinese possible; can I write in russian; talk to me in french; your
    languages; multilingual; switch to german; is there a german version; do you understand polish; language support;
    what languages can I use; can you translate; change the language
tests: run the tests; test suite; how do I test it; is it tested; unit tests; pytest; how do I contribute; develop
    tokamak; run tests locally; check my changes; how to run the checks; contribute code; ci; send a pull request;
    test the code
vllm: switch from vllm; vllm flags; vllm options; is it compatible with vllm; use vllm commands; migrate from vllm;
    vllm serve; replace vllm; does it take vllm arguments; my vllm command line; drop in for vllm; I used vllm before;
    are vllm flags understood; coming from vllm; what about vllm arguments
hello: hi there; hello there bot; hey you; hi everyone; good day to you; hello again my dear; hi how is it; heyho; hi
    it's me; good evening bot; hello world; morning; hi toy; is someone there; anyone; hello hello anyone there; knock
    knock; pleased to meet you; nice meeting you; let's chat; can we talk; I just wanted to say hello; greetings my
    friend; what is up; yo bot; hallo there; hey tokamak; good afternoon to you
thanks: thank you; thanks for that; many thanks; cheers mate; thank you bot; thanks, that works; great help; thx a
    lot; thank you so much; that helped; ok thanks; thanks again; very kind of you; thanks for the help; perfect thank
    you; thanks man; I am grateful; nice, thanks; that's what I needed
bye: bye; goodbye; see you; I have to leave; good night; until tomorrow; talk to you later; bye bye bot; that's it for
    today; I am off now; see ya later; ciao for now; until next time; take care bot; have a good one; I'm leaving;
    done for today; farewell my friend; catch you later
how are you: how are you; how is it going; how do you feel; are you fine; how have you been; what's new with you; how
    is your day; everything ok with you; how are things; you ok; how are you today bot; are you feeling well; how goes
    it; doing well; are you having a good day; hi how are you; how's life
praise: great; well done; good job; you are great; nice work; I like you; that's right; correct; awesome; wow; you are
    smart; that is cool; love it; perfect; brilliant answer; very nice; impressive stuff; good bot; you rock; this is
    fun; you are funny; excellent work; that was quick; good one; amazing answer; you are so clever; nice one
ok: ok; okay; alright; I see; got it; fine; understood; yes; no thanks; sure; makes sense; fair enough; good; all
    right then; yep; sounds good; ah ok; I understand; if you say so; no problem; never mind; well ok; oh; that is all
    for now; hm ok; ok fine; okay good; ah I see; ok got it
sorry: sorry; my bad; I apologise; oops sorry; excuse me please; that was my mistake; I am so sorry; sorry for that;
    pardon; I didn't mean that; typo, sorry; sorry wrong window; please excuse me
"""
_VERBS = """
add allow analyse answer bind bring build call cancel change chat check clear close compile compress compute configure
connect contribute deploy disable download empty enable encrypt expose find fix flush force free get give hook import
improve increase inspect install interrupt kick limit list load lock look make measure migrate monitor move open pass
pause point prevent print process profile protect put quantize quit reach read record reduce relaunch release reload
remove replace require reset restart resume run save scale secure see select send serve set share show shrink shut
speed split spread start stop stream suspend switch take terminate test trace try tune turn unload update upgrade use
view wake watch write
"""
_QUESTION_WORDS = """
what which who where when why how is are am was do does did can could will would should may must has have had it i my
you your there if so only nothing no not this that tell and
"""


def _read() -> dict[str, tuple[str, ...]]:
    lines = (line.partition(": ") for line in _LINES.strip().replace("\n    ", " ").splitlines())
    return {topic: tuple(text.strip() for text in texts.split(";")) for topic, _, texts in lines}


PHRASINGS = _read()
VERBS = frozenset(_VERBS.split())
QUESTION_WORDS = frozenset(_QUESTION_WORDS.split())
"""Beginnings of phrasings that are commands, and that are sentences."""
CHATTY_TOPICS = frozenset(("who", "skills", "more", "wrong", "english", "memory of chats", "tokamak", "name"))
"""Topics that are never asked for by a noun alone."""
