"""Questions of newcomers in wordings that are not in training: 300 questions, and the topics that answer them.

Called by `examination.py`; `data.py` keeps these wordings out of training. A line is topics (`facts.py`, `small_talk.py`;
`unknown`, `large` and `foreign` are declined), a colon and the question. An answer with an equals sign or after `=` is the
literal answer.
"""

_LINES = """
stop: how do i turn this thing off
stop: how can I make the server go down
stop: i want to close tokamak, what do i type
stop: how to kill the process cleanly?
stop: what's the right way to shut everything down?
stop: ctrl c does not feel right, how do I stop it properly?
stop: please shut down now
stop: how do i end this program
stop: is there a stop command?
stop: which key ends the server?
start: how do i get the server going
start: how do I bring up the engine?
start: what do I type to start everything?
start: how to run it for the first time
start: start tokamak how?
start: i just cloned the repo, what is the first command?
start: whats the command for starting the server
start/restart: the server is off, how do i turn it on again?
restart: how do I reboot the thing
restart: can i restart everything at once?
restart: how can a single worker be restarted
restart: worker0 is stuck, help
port: how do I make it listen on 9001
port: can i run it on port 5000 instead?
port: what port does it run on
port: how do i pick my own port
port: port 8000 is already taken on my machine, what can I do
port: which port number is the standard one
port: the port is used by something else
port: change port please
port: where do I configure the port
port: what is the http address of the api
port: which base url should my client have?
port: whats the url i have to call
port: where does the api live
port: how do I let my colleagues use this server
port: can i open it for my whole network?
port: how to make it reachable from my laptop
port: my phone cannot reach the server, how do i fix that
port: how do I serve on 0.0.0.0?
api key: do you want an api key from me?
api key: how can I put a password on the server
api key: which key should I put into my client
api key: is an api key needed?
api key: I get a 401, why?
tls: can I serve over https
tls: how do I add an ssl certificate?
own model: how do i use a model from huggingface
own model: i have a gguf file on disk, can you load it
own model: can I run qwen3 0.6b with this?
own model: how do I point it at my own checkpoint folder
own model: i want to serve a smarter model than this toy
own model: how to load llama 3 from a directory
own model: where can i set which model is served
own model: How would I run a real LLM here?
own model: which llm families can it serve
own model: what models work with tokamak?
own model: is mistral one of the supported models
own model: can tokamak run deepseek?
served models: what's the model name for requests?
served models: which model is loaded at the moment
served models: what do I write in the model field
downloaded models: how do I delete models that I downloaded
downloaded models: where do downloaded weights end up
chat: is there some kind of web ui?
chat: can i chat in my browser
chat: how do I talk to the model from a terminal
chat: do you have a graphical interface
chat: what's the address of the chat page
python: how do i call it from a python program
python: can I use the openai python package with you
python: show me how to use it in python
python: is there a python class for offline use
request: how do I send a prompt with curl
request: what endpoints can I call
request: what should the http request look like
request: give me an example request
request: are you compatible with the openai api?
request: can my ollama client talk to you
request: does the anthropic api work here
coding clients: can i use claude code with this
coding clients: how do I hook up codex
coding clients: will this work with open webui?
vision: can you look at a photo for me?
vision: are you able to see images
vision: how do I upload a picture
vision: can it handle images and videos
reload: how do I put in new weights without stopping
reload: can weights be swapped while it is running
reload: i have a newer checkpoint, how do I load it into the running server
health: how can I tell that the server is alive
health: is everything ok with the server?
health: what url do I use for health checks
health: how will I know that it finished loading
watch: where do i get prometheus metrics
watch: can I plot your numbers in grafana?
watch: is there something to scrape
watch: how do i see what's happening in the engine
watch: can I look at live statistics
watch: is there something like htop for it
watch: how do I keep an eye on the server
watch: what is tokamak top good for
watch: how can I see the pids of all processes
watch: show all running processes of the engine
error: where does it write its logs
error: how do I look at the log output
error: i want to see more log messages
error: i keep getting error 400
error: it does not work, what should I do
error: i see an error message, help
error/served models: why do i see 400 bad request
users: what's the reason for status 429
users: the server says too many requests
death: what if i kill one of the processes
death: does my stream break when a worker crashes?
death: what does the engine do after a crash of an actor
death: is my answer lost if a process dies?
death: how often can a worker crash before it stops
death: what happens to a process that hangs
death: how does it find out that an actor is frozen
death: does it leave files in shared memory after a crash?
sampling: do i always get the same answer to the same question
sampling: can other people's requests change my output
cache: what does prefix caching mean
cache: explain to me what the prefix cache is
cache: how do I empty the prefix cache
cache: can I switch prefix caching off?
cache: what's the kv cache
cache: what is stored in the kv cache
memory: how much ram will it use
memory: how can I make it need less ram
memory: it runs out of memory, what can i do
memory: how do I run a model in 4 bit
memory: does it read awq models
memory: can i quantize to int8
hardware: does this need a gpu
hardware: can it use my nvidia card
hardware: does it work on a normal laptop cpu
hardware: what kind of machine do I need for this
hardware: will it run without a graphics card?
framework: is pytorch needed
framework: do i have to install paddle
framework: what is it using for computing, torch or paddle?
framework: what programming language was used for tokamak
framework: is the engine written in rust or python?
hardware: does it work on windows 11
hardware: can I use it on my macbook
hardware: what python do I need
hardware: which linux do you need?
install: how do I install this on ubuntu
install: is there a pip package for it
install: how do i get the newest version
install: what do I have to do to install it
docker: do you offer a docker image
docker: can it run in kubernetes
docker: how do I run this inside a container
manual: is there any documentation i can read
manual: where are all the options explained
manual: show me a list of all commands
manual: where can i find a guide for beginners
manual: can I put my options into a file
manual: is there an environment variable for options
version: which version am I running
version: how do i find out the version
context: how many tokens is your context
context: what is the longest prompt I can send
context: can I make the context longer
sampling: how do I set the temperature
sampling: can I get shorter answers
sampling: what does top_p do
sampling: how do i fix the seed
tools: does function calling work
tools: can you use tools?
tools: how do I pass tools to the model
structured: can I force the output to be json
structured: does it support json schema
structured: how do I get valid json every time
thinking: can you show your reasoning
thinking: how do I switch on thinking
embeddings: can I get embeddings from you
embeddings: is there an endpoint for embeddings
batch: how do I process a whole file of prompts
batch: can i run a batch job over many prompts
lora: can I use my lora adapter
lora: how are lora adapters loaded
parallel: can it run on two machines
parallel: how do I use tensor parallel
parallel: can I have more than one replica
drafts: what does speculative decoding do
drafts: how do I enable draft tokens
faster: how do i speed it up
faster: why does it take so long
faster: how can I measure how fast it is
faster: the answers are really slow
trace: how do I record a trace
trace: is there a way to profile it
pause: how can I pause the engine for a while
pause: can the server be paused and continued
pause: how do I free the weights memory
pause: can i put it to sleep over night
abort: how do I stop a request that is running
abort: can I cancel an answer
users: how many people can use it at once
users: can several clients ask at the same time
privacy: do you keep what I type
privacy: does it send my data somewhere
privacy: is what I write here private?
privacy: does it work without internet
memory of chats: will you remember this tomorrow
memory of chats: do you learn from our conversation
memory of chats: can you remember what I told you before?
trained: who made you
trained: how did they train you
trained: what data were you trained with
trained: where do you come from
trained: how many parameters have you got
trained: are you a small or a big model
trained/who: how tiny are you
english: can you speak german with me
english: do you know any other languages
english: do you understand spanish?
tests: how do i run the test suite
tests: where are the tests started
vllm: i am coming from vllm, what changes
vllm: do vllm options work here
licence: can my company use it for free
licence: is it really open source
licence: what's the license of this software
licence: how much money does it cost
who: hey who are you
who: what is your name please
who: are you chatgpt or something else
who: so you are an ai?
who: what am i talking to right now
who: tell me who you are
who: which llm is this
who: are you a real human being
who/tokamak: what is this
skills: what can you do for me
skills: what are the things you can do
skills: hello, what can i ask here?
skills: can you help me with something
skills: what are you good for?
skills: help me please
skills/more: give me an idea what to ask
skills/more: what other stuff can you do
skills/more: what should i try next
skills: how am I supposed to use you
skills: list your features
skills/who/tokamak: what is all this for
more: what else?
more/skills: tell me more things to try
more: another one please
tokamak: so what exactly is tokamak
tokamak: can you explain tokamak to me
tokamak: whats this server software about
tokamak: give me a short description of tokamak
name: why did they name it tokamak
name: where does the word tokamak come from
different: why is tokamak better than vllm
different: what's the advantage of this engine
different: what does it do that others don't
actors: what are the different actors
actors: which processes belong to the engine
actors: how many processes run here
actors: what exactly is an actor
actors: is an actor its own process?
supervisor: what is the job of the supervisor
supervisor: which process restarts the others
api actor: what's the api process for
tokenizer: what is the tokenizer there for
scheduler: what's the job of the scheduler
scheduler: who forms a batch
cache actor: what is the cache actor there for
worker: what's a worker process doing
worker: which actor computes the model
media actor: what is the media process for
messages: how do your processes exchange messages
messages: what is shared memory used for
messages: are the messages pickled
stream: can I get the answer token by token
stream: does streaming work
wrong: that's not right
wrong: are you really sure about that
wrong: this answer makes no sense
wrong: you are wrong my friend
wrong: why is your answer wrong
hello: hello my friend
hello: hi bot
hello: good morning tokamak
hello: is anyone home?
thanks: thanks a bunch
thanks: thank you so much for that
thanks: great thank you
bye: bye for now
bye: see you next time
how are you: how are you doing my friend
praise: that is a good answer
praise: you are really cool
ok: ok cool
ok: okay then
sorry: sorry my mistake
unknown: what's the capital city of spain
unknown: who is the president of the usa
unknown: write me a poem about my dog
unknown: tell me something funny
unknown: what will the weather be like tomorrow
unknown: can you write a python script that sorts files
unknown: what time is it in new york
unknown: how do I bake bread
unknown: translate good morning into french
unknown: who won the world cup in 2018
unknown: recommend me a movie for tonight
unknown: what is the speed of light
unknown: how far away is the moon
unknown: should I learn java or c++
unknown: give me a recipe for pancakes
unknown: explain relativity in simple words
unknown: what's the stock price of apple
unknown: my girlfriend left me, what should I do
large: what is 123456 + 654321
large: 3.5 times 2.25
large: what is the square root of 144
large: 1 + 2 + 3 + 4
=12 + 30 = 42: how much is 12 plus 30
=7 * 8 = 56: how much is 7 times 8
=5 * 6 = 30: can you tell me what 5 * 6 is
=81 / 9 = 9: 81 divided by 9 please
=9 * 9 = 81: whats 9x9
=144 / 12 = 12: how much is 144/12
=100 - 37 = 63: what remains of 100 minus 37
=7 + 8 = 15: what is 7 and 8 together
=2 + 2 = 4: what is {two} plus {two}
=6 * 7 = 42: {six} times {seven} is what?
=tenalp: could you write {planet} backwards please
=olleh: {hello} in reverse please
=COFFEE: {coffee} in all caps please
"""


def _read() -> tuple[tuple[str, str], ...]:
    found = []
    for line in _LINES.strip().splitlines():
        topics, _, text = line.partition(": ")
        found.append((topics, text))
    return tuple(found)


NEWCOMER_QUESTIONS = _read()
"""Topics, and a question."""


def plain(text: str) -> str:
    """Return a wording reduced to lower-case letters and digits, which typing does not change."""
    return " ".join("".join(letter if letter.isalnum() else " " for letter in text.lower().replace("'", "")).split())


NEWCOMER_WORDINGS = frozenset(plain(text) for _, text in NEWCOMER_QUESTIONS)
