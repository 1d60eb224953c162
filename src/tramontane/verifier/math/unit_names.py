"""The names of units and of counted things, and the words that may accompany them."""

from __future__ import annotations

# Symbols that take an SI prefix.
_SI_SYMBOLS = "m g s A K mol cd Hz N Pa J W C V F Ω S Wb T H lm lx Bq Gy Sv L l eV cal Wh bar B b M"
_SI_PREFIXES = (*"YZEPTGMkhdcmµunpfa", "da")
_SYMBOLS = {
    prefix + symbol: (prefix.replace("u", "µ") + symbol.replace("l", "L", symbol == "l"))
    for symbol in _SI_SYMBOLS.split()
    for prefix in ("", *_SI_PREFIXES)
}
# "B" and "b" need a prefix, or a name; MM is millions.
for _other in ("B", "b", "a", "u", *(f"{prefix}M" for prefix in "YZEPTGMkhdcfa"), "daM"):
    _SYMBOLS.pop(_other, None)
# Bars and line ends separate units: first the canonical name, then the others, plural s implied.
# Prefixes by name (kilo-, centi-, micro-) are added to the units of the first line.
_PREFIXABLE = """
    m meter metre mètre metro | g gram gramme gramo grammo | L liter litre litro | s second | J
    joule W watt | V volt | A ampere | N newton | Pa pascal | Hz hertz | Ω ohm | C coulomb | F
    farad | H henry | T tesla | K kelvin | mol mole | eV electronvolt electron-volt | cal calorie |
    B byte | b bit | Wb weber | S siemens | Gy gray | Sv sievert | lm lumen | lx lux | cd candela |
    Bq becquerel | Wh watt-hour watthour
"""
_OTHERS = """
    mm мм 毫米 | cm zentimeter см 厘米 | m м 米 метр метра метров | km км 公里 千米
    | mg мг 毫克 | g gm г 克 грамм грамма граммов | kg kgs кг 千克 公斤 | mL мл 毫升 | L 升 л
    | kΩ kilohm | MΩ megohm | min minute 分钟 минута минут минуты minuto minuten мин
    | s sec secs 秒 секунд секунды с seconde segundo secondo sekunde sekunden
    | h hr hrs hour 小时 час часа часов ч heure hora ora ore stunde stunden
    | day 天 день дня дней jour día giorno giorni tag tage tagen
    | week 周 semaine semana settimana settimane woche wochen
    | month 月 mois mes meses mese mesi monat monate
    | year yr 年 год года лет année ans an anni anno año jahr jahre | decade | century centuries
    | in inch inches | ft foot feet | yd yard | mi mile | lb lbs pound | oz ounce | t ton tonne 吨
    | gal gallon | qt quart | pt pint | cup | tbsp tablespoon | tsp teaspoon | acre | ha hectare
    | mph | km·h^-1 kmph kph kmh | revolution·min^-1 rpm | beat·min^-1 bpm | atm | psi
    | mmHg | torr | dB decibel | ppm | knot | AU | Å angstrom ångström | light-year lightyear ly
    | light-minute | parsec | erg
    | dyn dyne | gauss | poise | curie | deg degree grad grado degré градус 度 | degC celsius
    | degF fahrenheit | rad radian | sr steradian | % percent pct percentage prozent процент
    | usd dollar 美元 | cent ¢ | eur euro € | gbp £ | jpy yen ¥ | inr rupee rs ₹
    | rub ruble рубль рублей рубля | cny yuan 元 | am a.m | pm p.m
"""
_PREFIX_NAMES = {
    "": "", "kilo": "k", "mega": "M", "giga": "G", "tera": "T", "centi": "c", "deci": "d",
    "milli": "m", "micro": "µ", "nano": "n", "pico": "p", "hecto": "h",
}  # fmt: skip
_THINGS = """
    acorn adult airplane album angle animal answer ant apartment apple arc arrangement article
    avocado baby babies bag bale ball balloon banana band bar barrel basket basketball bat batch
    batches bead bean bear bed bee bee bell belt berry berries bicycle bike bill bird birthday
    biscuit block blossom blueberry blueberries board boat bolt book bookcase bottle bounce
    bouquet bowl box boxes boy bracelet branch branches brick brother brownie bucket bug building
    bull bunch bunches bundle bus buses bush bushes bushel business businesses button cake
    calculator camper can candle candy candies car card carnation carpet carrot carton case cat
    cell chair channel chapter character cheesecake cherry cherries chicken child children chip
    chocolate choice choices chord circle citizen city cities class classes client coconut code
    codeword coin color colour colored column combination comic competitor component computer cone
    contestant container cookie copy copies corner course cow cracker crate crayon cube cucumber
    cupcake curve customer cut cycle daisy daisies dart daughter deer diagonal diamond die dice
    digit dime dish dishes divisor dog doll dolphin domino dominoes donut door dot doughnut dress
    dresses drink driver drop duck edge egg element elephant email employee engineer envelope
    episode equation event exam example experiment face factor family families fan farm farmer
    feather female file film fireman fish fishes flag flight floor flower fly folder fork frog
    friend fruit game garden gift girl glass glasses goal goat goldfish goose geese grade grain
    grandchild grandchildren grape graph group guest guppy guppies haircut hamburger handshake hat
    head hen hexagon hit hole home horse hotdog hotel house image insect integer intersection
    invitation item jar jellybean job joke jump key kid kind king kitten knife knives lamp lap
    leaf leaves leg lego lemon letter level light line lion list lobster lollipop machine magazine
    magnet male man men mango mangoes map marble marker mark mask match matches matrix matrices
    meal medal member message method mistake mode molecule monkey monomial mouse mice move movie
    mug multiple nail napkin necklace nickel night node note notebook notepad novel number nurse
    nut object octagon offer onion option orange orbit order ordering orphan outcome outfit owl
    oyster package packet pack page painting pan pancake panel paper parent park parrot part
    partition party parties passenger paper path patient pattern peach peaches peanut pear pearl
    pebble pen pencil pencils penguin penny pennies pentagon people permutation person pet phone
    photo photograph picture pie piece pig pigeon pill pillow pilot pin pizza place plane planet
    plank plant plate player point polygon polynomial pond position possibility possibilities post
    poster pot potato potatoes present prize problem processor program project pumpkin pupil puppy
    puppies purse puzzle queen question rabbit rectangle region revolution ribbon ring river rock
    roll room roots rope rose rotation round route row rug salad sandwich sandwiches scarf scarves
    school scoop seashell seat section seed segment semester sentence sequence serving session set
    shape sheep shelf shelves shell ship shirt shoe shop shot shovel show side sister skirt slice
    snack snake soccer sock soda sofa soldier solution son song spider spoon spot square squirrel
    stair stamp star state station statue step stick sticker stitch stitches stone stool store
    story stories straw strawberry strawberries street string stripe student style subject subset
    suit suspect sweater sweet symmetry symmetries table tablet tail task taxi teacher team tent
    term test text thing ticket tie tile time tin tire token tomato tomatoes tool toothpick towel
    tower town toy track train tray tree trial triangle trip truck trumpet tube tulip turn turtle
    tuple van value variable vase vector vegetable vehicle vertex vertices video visit visitor
    volunteer vote wallet watch watches watermelon way wheel widget wife window winner wolf wolves
    woman women word worker world worm zeroes sit-up push-up milkshake kernel situp balloon legs
    meatball sculpture mushroom lunch lunches cartons calf calves rat rectangle rhombus trapezoid
    parallelogram cheese water milk juice sugar flour rice butter paint oil gas gasoline wood sand
    soil food coffee tea wine money blood salt honey fabric data memory pomme personne livre
    enfant façon manière élève étudiant fille garçon fois euro point manzana persona libro niño
    forma manera alumno estudiante vez veces punto mela mele persone libri bambino bambini modo
    modi studente studenti volta volte punto punti äpfel apfel personen bücher buch kinder kind
    möglichkeiten möglichkeit schüler studenten mal punkt punkte яблоко яблока яблок человек
    человека книга книги книг способ способа способов раз раза ученик ученика учеников студентов
    точка точки точек штук штуки 个 只 本 人 张 条 块 件 名 位 辆 棵 头 种 次 岁 朵 支 枝 瓶 杯 盒
    箱 页 道 颗 粒 篮 袋 双筷 家 间
    beat rotation breath photon electron proton neutron nucleus nuclei
    层 步 苹果 学生 书 鸡蛋 点 边 方法 方式 解
"""
# Words before a counted thing, and words without meaning in a unit.
_QUALIFIERS_WORDS = """
    red green blue yellow white black brown pink purple orange golden silver colored coloured
    large small big little tiny tall long wide old new young total possible different distinct
    unique equal whole complete full entire additional extra more other positive nonnegative
    natural real prime even odd ordered unordered integer lattice right isosceles equilateral
    regular square rectangular male female adult chocolate apple cherry tennis soccer rubber paper
    plastic wooden gold the children basketball ticket school football fresh ripe ordered
    american us u.s canadian rouge rouges vert verte vertes verts rojas rojo rosse rossi rote
    roten rot красных зелёных
"""
QUALIFIERS = frozenset(_QUALIFIERS_WORDS.split())  # fmt: skip
_NEUTRAL_WORDS = """
    unit units each apiece left remaining altogether total in-total in-all 单位
"""
NEUTRAL = frozenset(_NEUTRAL_WORDS.split())


def _named(lines: str, prefixes: dict[str, str]) -> dict[str, str]:
    table = {}
    for names in lines.split("|"):
        canonical, *others = names.split() or [""]
        for prefix, symbol in prefixes.items():
            for word in (canonical, *others):
                if word in _SYMBOLS or (len(word) == 1 and word.isascii() and word != "%"):
                    continue  # case matters: `k` is not kelvin
                plural = (f"{prefix}{word}s",) if len(word) > 2 else ()
                for name in (prefix + word, *plural):
                    table[name.lower()] = symbol + canonical
    return table


NAMES = _named(_PREFIXABLE, _PREFIX_NAMES) | _named(_OTHERS, {"": ""})
SYMBOLS = {**_SYMBOLS, "h": "h", "t": "t", "Å": "Å", "°": "deg"}
THINGS = set(_THINGS.split()) | {f"{word}s" for word in _THINGS.split() if word.isascii()}
