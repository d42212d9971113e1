"""Text that the demonstration model does not understand: other languages, emoji, pressed keys. Called by `data.py`.

The languages and sentences of `UNSEEN` are used only in the examination.
"""

# ruff: noqa: RUF001 (contains look-alike letters on purpose)

import random

from tools.demo.words import invented_word

SENTENCES = {
    "de": "Wie geht es dir?|Was kannst du?|Hallo, wer bist du?|Wie spät ist es?|Ich habe eine Frage|Kannst du mir helfen?|"
    "Was ist Tokamak?|Wie halte ich den Server an?|Guten Morgen|Danke schön|Erzähl mir einen Witz|Was ist drei plus "
    "vier?|Wo ist der Bahnhof?|Das ist nicht richtig|Ich verstehe dich nicht|Bitte schreibe ein Gedicht über den "
    "Herbst|wie heisst die hauptstadt von frankreich|ja genau|"
    "Welchen Port benutzt du?|Wie starte ich das Programm?|Sag mir, was du alles kannst|Schalte den Server aus|"
    "Welches Modell läuft hier?|Kannst du rechnen?|Zeig mir ein Beispiel|Warum ist das so langsam?|"
    "Wo finde ich die Anleitung?|Ich möchte das Modell wechseln|Sprichst du Englisch?|Nein danke|"
    "Was bedeutet dieser Fehler?|Mein Name ist Anna",
    "fr": "Comment ça va ?|Que peux-tu faire ?|Bonjour, qui es-tu ?|Quelle heure est-il ?|J'ai une question|Peux-tu "
    "m'aider ?|Qu'est-ce que Tokamak ?|Comment arrêter le serveur ?|Merci beaucoup|Raconte-moi une blague|Combien "
    "font trois plus quatre ?|Où est la gare ?|Je ne comprends pas|Écris un poème sur l'automne|quelle est la "
    "capitale de l'allemagne|oui bien sûr|bonsoir|salut|"
    "Quel port utilises-tu ?|Comment lancer le programme ?|Dis-moi ce que tu sais faire|Arrête le serveur|"
    "Quel modèle est-ce ?|Sais-tu calculer ?|Montre-moi quelque chose|Pourquoi est-ce si lent ?|"
    "Où se trouve la documentation ?|Je veux changer de modèle|Tu parles anglais ?|Non merci|"
    "Que veut dire cette erreur ?|Comment installer le logiciel ?|Je m'appelle Anne|"
    "Comment mettre un mot de passe ?",
    "es": "¿Cómo estás?|¿Qué puedes hacer?|Hola, ¿quién eres?|¿Qué hora es?|Tengo una pregunta|¿Puedes ayudarme?|¿Qué es "
    "Tokamak?|¿Cómo detengo el servidor?|Muchas gracias|Cuéntame un chiste|¿Cuánto es tres más cuatro?|¿Dónde está "
    "la estación?|No entiendo|Escribe un poema sobre el otoño|cual es la capital de francia|buenos dias|hasta luego|"
    "si claro|"
    "¿Qué puerto usas?|¿Cómo inicio el programa?|Dime qué sabes hacer|Apaga el servidor|¿Qué modelo es este?|"
    "¿Sabes calcular?|Muéstrame algo|¿Por qué es tan lento?|¿Dónde está el manual?|Quiero cambiar el modelo|"
    "¿Entiendes inglés?|No gracias|¿Qué significa este error?|Me llamo Ana",
    "it": "Come stai?|Cosa sai fare?|Ciao, chi sei?|Che ore sono?|Ho una domanda|Puoi aiutarmi?|Che cos'è Tokamak?|Come "
    "fermo il server?|Grazie mille|Raccontami una barzelletta|Quanto fa tre più quattro?|Dov'è la stazione?|Non "
    "capisco|Scrivi una poesia sull'autunno|qual è la capitale della francia|buongiorno|arrivederci|"
    "Quale porta usi?|Come avvio il programma?|Dimmi cosa sai fare|Spegni il server|Che modello è questo?|"
    "Sai calcolare?|Fammi vedere un esempio|Perché è così lento?|Dove si trova il manuale?|Voglio cambiare modello|"
    "Capisci l'inglese?|No grazie|Mi chiamo Anna",
    "pt": "Como vai você?|O que você sabe fazer?|Olá, quem é você?|Que horas são?|Tenho uma pergunta|Você pode me ajudar?|"
    "O que é Tokamak?|Como paro o servidor?|Muito obrigado|Conte uma piada|Quanto é três mais quatro?|Onde fica a "
    "estação?|Não entendo|Escreva um poema sobre o outono|bom dia|até logo|"
    "Qual porta você usa?|Como inicio o programa?|Diga o que sabe fazer|Desligue o servidor|Que modelo é este?|"
    "Sabe calcular?|Mostre um exemplo|Por que é tão lento?|Onde está o manual?|Quero mudar o modelo|Não obrigado|"
    "Meu nome é Ana",
    "nl": "Hoe gaat het met je?|Wat kun je doen?|Hallo, wie ben jij?|Hoe laat is het?|Ik heb een vraag|Kun je mij helpen?|"
    "Wat is Tokamak eigenlijk?|Hoe stop ik de server?|Dank je wel|Vertel een grap|Hoeveel is drie plus vier?|Waar is "
    "het station?|Ik begrijp het niet|Schrijf een gedicht over de herfst|goedemorgen|tot ziens|"
    "Welke poort gebruik je?|Hoe start ik het programma?|Zeg wat je kunt|Zet de server uit|Welk model is dit?|"
    "Kun je rekenen?|Laat een voorbeeld zien|Waarom is het zo traag?|Waar staat de handleiding?|Nee bedankt|"
    "Ik heet Anna",
    "sv": "Hur mår du?|Vad kan du göra?|Hej, vem är du?|Vad är klockan?|Jag har en fråga|Kan du hjälpa mig?|Hur stoppar "
    "jag servern?|Tack så mycket|Berätta ett skämt|Var är stationen?|Jag förstår inte|god morgon|hej då|"
    "Vilken port använder du?|Hur startar jag programmet?|Stäng av servern|Vilken modell är det här?|"
    "Visa ett exempel|Varför är det så långsamt?|Nej tack|Jag heter Anna",
    "pl": "Jak się masz?|Co potrafisz?|Cześć, kim jesteś?|Która godzina?|Mam pytanie|Czy możesz mi pomóc?|Jak zatrzymać "
    "serwer?|Dziękuję bardzo|Opowiedz dowcip|Gdzie jest dworzec?|Nie rozumiem|dzień dobry|do widzenia|"
    "Jakiego portu używasz?|Jak uruchomić program?|Wyłącz serwer|Jaki to model?|Pokaż przykład|Dlaczego tak wolno?|"
    "Mam na imię Anna",
    "cs": "Jak se máš?|Co umíš?|Ahoj, kdo jsi?|Kolik je hodin?|Mám otázku|Můžeš mi pomoct?|Jak zastavím server?|Děkuji moc|"
    "Řekni vtip|Kde je nádraží?|Nerozumím|dobrý den|na shledanou",
    "tr": "Nasılsın?|Ne yapabilirsin?|Merhaba, sen kimsin?|Saat kaç?|Bir sorum var|Bana yardım eder misin?|Sunucuyu nasıl "
    "durdururum?|Çok teşekkürler|Bir fıkra anlat|İstasyon nerede?|Anlamıyorum|günaydın|hoşça kal",
    "ru": "Как дела?|Что ты умеешь?|Привет, кто ты?|Который час?|У меня есть вопрос|Ты можешь мне помочь?|Что такое "
    "Токамак?|Как остановить сервер?|Большое спасибо|Расскажи анекдот|Сколько будет три плюс четыре?|Где вокзал?|Я "
    "не понимаю|Напиши стихотворение про осень|доброе утро|пока|"
    "Какой порт ты используешь?|Как запустить программу?|Выключи сервер|Какая это модель?|Покажи пример|"
    "Почему так медленно?|Меня зовут Анна",
    "uk": "Як справи?|Що ти вмієш?|Привіт, хто ти?|Котра година?|У мене є питання|Допоможи мені|Як зупинити сервер?|Дуже "
    "дякую|Я не розумію|доброго ранку",
    "el": "Τι κάνεις;|Τι μπορείς να κάνεις;|Γεια σου, ποιος είσαι;|Τι ώρα είναι;|Έχω μια ερώτηση|Ευχαριστώ πολύ|Δεν "
    "καταλαβαίνω|καλημέρα",
    "ar": "كيف حالك؟|ماذا يمكنك أن تفعل؟|مرحبا، من أنت؟|كم الساعة؟|لدي سؤال|هل يمكنك مساعدتي؟|كيف أوقف الخادم؟|شكرا جزيلا|"
    "لا أفهم|صباح الخير|"
    "أي منفذ تستخدم؟|أعطني مثالا",
    "he": "מה שלומך?|מה אתה יכול לעשות?|שלום, מי אתה?|מה השעה?|יש לי שאלה|תודה רבה|אני לא מבין|בוקר טוב",
    "hi": "आप कैसे हैं?|आप क्या कर सकते हैं?|नमस्ते, आप कौन हैं?|कितने बजे हैं?|मेरा एक सवाल है|क्या आप मेरी मदद कर सकते "
    "हैं?|बहुत धन्यवाद|मुझे समझ नहीं आया|सुप्रभात|"
    "यह कौन सा मॉडल है?|सर्वर कैसे बंद करें?",
    "zh": "你好吗？|你能做什么？|你好，你是谁？|现在几点了？|我有一个问题|你能帮我吗？|什么是托卡马克？|怎么停止服务器？|"
    "非常感谢|讲个笑话|三加四等于多少？|车站在哪里？|我不明白|写一首关于秋天的诗|早上好|再见|你好|"
    "用哪个端口？|如何启动程序？|关闭服务器|这是什么模型？|给我看一个例子|为什么这么慢？",
    "ja": "お元気ですか？|何ができますか？|こんにちは、あなたは誰ですか？|今何時ですか？|質問があります|"
    "手伝ってくれますか？|サーバーを止めるにはどうすればいいですか？|ありがとうございます|冗談を言って|"
    "駅はどこですか？|"
    "わかりません|おはよう|さようなら|こんにちは|"
    "どのポートを使っていますか？|プログラムを起動するには？|これは何のモデルですか？|例を見せてください|なぜ遅いのですか？",
    "ko": "잘 지내세요?|무엇을 할 수 있나요?|안녕하세요, 누구세요?|지금 몇 시예요?|질문이 있어요|도와주실 수 있나요?|"
    "서버를 어떻게 멈추나요?|감사합니다|이해가 안 돼요|안녕|"
    "어떤 포트를 사용하나요?|예를 보여 주세요",
    "id": "Apa kabar?|Apa yang bisa kamu lakukan?|Halo, siapa kamu?|Jam berapa sekarang?|Saya punya pertanyaan|Bisakah "
    "kamu membantu saya?|Bagaimana cara menghentikan server?|Terima kasih banyak|Saya tidak mengerti|selamat pagi",
    "vi": "Bạn khỏe không?|Bạn có thể làm gì?|Xin chào, bạn là ai?|Mấy giờ rồi?|Tôi có một câu hỏi|Cảm ơn nhiều|Tôi không "
    "hiểu|chào buổi sáng",
    "fi": "Mitä kuuluu?|Mitä osaat tehdä?|Hei, kuka sinä olet?|Paljonko kello on?|Minulla on kysymys|Kiitos paljon|En "
    "ymmärrä|hyvää huomenta",
    "hu": "Hogy vagy?|Mit tudsz csinálni?|Szia, ki vagy te?|Hány óra van?|Van egy kérdésem|Köszönöm szépen|Nem értem|jó "
    "reggelt",
    "ro": "Ce mai faci?|Ce poți face?|Bună, cine ești?|Cât este ceasul?|Am o întrebare|Mulțumesc mult|Nu înțeleg|bună "
    "dimineața",
    "la": "Quid agis?|Quis es?|Quota hora est?|Gratias tibi ago|Non intellego|salve magister",
    "is": "Hvernig hefurðu það?|Hver ert þú?|Ég skil ekki|Takk fyrir|Hvað getur þú gert?|Hvað er klukkan?",
    "sk": "Ako sa máš?|Kto si?|Čo vieš robiť?|Ďakujem pekne|Nerozumiem|Koľko je hodín?",
    "sl": "Kako gre?|Kdo si?|Kaj znaš?|Najlepša hvala|Ne razumem|Dobro jutro",
    "lv": "Kā tev iet?|Kas tu esi?|Liels paldies|Es nesaprotu|Labrīt|Vai tu vari man palīdzēt?",
    "sq": "Si je?|Kush je ti?|Faleminderit shumë|Nuk kuptoj|Çfarë mund të bësh?|Mirëmëngjes",
    "cy": "Sut wyt ti?|Pwy wyt ti?|Diolch yn fawr|Dydw i ddim yn deall|Bore da|Beth wyt ti'n gallu ei wneud?",
    "gl": "Que tal estás?|Quen es?|Moitas grazas|Non entendo|Bos días|Que sabes facer?",
    "zu": "Unjani?|Ungubani?|Ngiyabonga kakhulu|Angiqondi|Sawubona|Wenzani namhlanje?",
    "yo": "Bawo ni?|Tani iwọ?|E se pupo|Emi ko loye|Kini o le se?",
    "mg": "Manao ahoana?|Iza ianao?|Misaotra betsaka|Tsy azoko|Inona no azonao atao?",
    "ht": "Kijan ou ye?|Kiyès ou ye?|Mèsi anpil|Mwen pa konprann|Kisa ou ka fè?",
    "th": "สบายดีไหม|คุณทำอะไรได้บ้าง|สวัสดี คุณเป็นใคร|ขอบคุณมาก|ฉันไม่เข้าใจ",
    "fa": "حال شما چطور است؟|سلام، شما کی هستید؟|ساعت چند است؟|خیلی ممنون|من نمی فهمم",
}
UNSEEN = (
    *(
        "Wie schalte ich dieses Programm aus?",
        "Was soll ich dich fragen?",
        "Sprich mit mir auf Deutsch",
        "Welche Befehle gibt es?",
    ),
    *("Peux-tu parler français ?", "Comment changer de port ?", "Donne-moi un exemple", "Quel temps fait-il aujourd'hui ?"),
    *("¿Hablas español?", "¿Cómo cambio el puerto?", "Dame un ejemplo por favor", "Me gusta mucho el fútbol"),
    *("Parli italiano?", "Come si cambia la porta?", "Fala português?", "Qual é o seu nome?", "Spreek je Nederlands?"),
    *(
        "Ты говоришь по-русски?",
        "Как поменять порт?",
        "Сколько тебе лет?",
        "你会说中文吗？",
        "怎么换端口？",
        "今天天气怎么样？",
    ),
    *("日本語を話せますか？", "ポートを変えるには？", "한국어 할 줄 아세요?", "هل تتكلم العربية؟", "क्या आप हिंदी बोलते हैं?"),
    *("Hvordan går det?", "Hvem er du?", "Kan du hjelpe meg?", "Jeg forstår ikke", "Mange tak for hjælpen"),
    *("Kako si?", "Što možeš učiniti?", "Hvala lijepo", "Здравей, как си?", "Ce faceți astăzi?", "Czy mówisz po polsku?"),
    *("আপনি কেমন আছেন?", "როგორ ხარ?", "ինչպես ես", "நீங்கள் யார்?", "Kumusta ka?", "Habari yako?", "Kiel vi fartas?"),
    *(
        "Ma nimi on Jaan",
        "Ar galite man padėti?",
        "Zer moduz zaude?",
        "Com estàs avui?",
        "Conas atá tú?",
        "Hoe gaan dit met jou?",
    ),
)
EMOJI = (
    "😀😂🤣😊😍😘😎🤔😴😭😡👍👎👋🙏👏💪🎉🎂🔥✨⭐🌈🌍🌙☀️☔❄️🍎🍕🍔🍟🍺☕🐶🐱"
    "🐭🦊🐻🐼🐸🐵🦄🚀✈️🚗🚲🏠💻📱💡📚✏️🎵🎸⚽🏀❤️💔💯✅❌❓❗🤖👀🙈💀👻🎃🤷🤦"
)
UNSEEN_EMOJI = "🥦🎁🧠🐙🌵🛒🧊🪁🥁🧀🥳🤩😇🫶🙌🌽"
_KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "asdf", "jkl", "1234567890", "sdfgh", "xcvb")
_SIGNS = (
    "...",
    "!!!",
    "???",
    "...",
    "-",
    "--",
    ";",
    ",,,",
    "@@",
    "#",
    "***",
    "$$$",
    "%",
    "&&",
    "~~",
    "(",
    ")",
    "/",
    "\\",
    "|",
    "<>",
    "=",
    "_",
)


def _emoji(source: random.Random, pool: str = EMOJI) -> str:
    return "".join(source.choice([sign for sign in pool if sign != "\ufe0f"]) for _ in range(source.choice((1, 1, 1, 2, 3, 4))))


def _keys(source: random.Random) -> str:
    """Return random typing."""
    kind = source.random()
    if kind < 0.3:
        return source.choice(_SIGNS) * source.choice((1, 1, 2))
    row = source.choice(_KEYS[:3] if kind < 0.8 else _KEYS)
    return " ".join(
        "".join(source.choice(row) for _ in range(source.randint(4, 11))) for _ in range(source.choice((1, 1, 1, 2)))
    )


def foreign_text(source: random.Random) -> str:
    """Draw a training text: a sentence, a part or a mixture of one language, words of no language, emoji, or keys."""
    kind = source.random()
    if kind < 0.2:
        return _emoji(source)
    if kind < 0.27:
        return _emoji(source) + source.choice(("", "?", " " + _emoji(source)))
    if kind < 0.36:
        return _keys(source)
    if kind < 0.44:
        return " ".join(invented_word(source, 9) for _ in range(source.randint(2, 5))) + source.choice(("", "?", ".", "!"))
    sentences = SENTENCES[source.choice(list(SENTENCES))].split("|")
    text = source.choice(sentences)
    if kind < 0.74:
        words = [word for sentence in sentences for word in sentence.split()]
        text = " ".join(source.sample(words, min(len(words), source.randint(2, 6))))
    if source.random() < 0.3:
        text = text.lower()
    if source.random() < 0.2:
        text = text.rstrip("?!.？ ")
    return text + (" " + _emoji(source) if source.random() < 0.08 else "")


def unseen_text(source: random.Random) -> str:
    """Draw a text for the examination."""
    return source.choice(UNSEEN) if source.random() < 0.8 else _emoji(source, UNSEEN_EMOJI)
