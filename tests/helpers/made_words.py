"""Pools of common words for the made sets: those of the training, dev and test splits are disjoint."""

from __future__ import annotations

import random
from collections.abc import Sequence

SPLITS = ("train", "dev", "test")

NAMES = (
    "anna ben carl diana edward emma frank grace henry irene jack julia kevin laura martin nancy oliver paul "
    "rachel sam "
    "susan thomas victor walter alice arthur betty bruce charles claire daniel dorothy eric eva fred george "
    "helen hugo "
    "ivan jane jason karen leo linda louis lucy marcus maria mark mary michael monica nathan nicole oscar "
    "peter philip "
    "ralph rebecca richard robert ruth sarah simon sophia stephen teresa tony vera vincent wendy william"
).split()
ANSWERS = {
    "job": "teacher farmer baker lawyer painter driver nurse singer writer soldier sailor butcher judge engineer "
    "doctor actor pilot dancer carpenter miner fisherman tailor waiter guard priest hunter professor photographer",
    "city": "london paris boston chicago berlin rome madrid vienna dublin moscow tokyo toronto sydney cairo athens "
    "oxford seattle denver glasgow lisbon prague houston dallas amsterdam manchester stockholm munich melbourne",
    "animal": "dog cat horse rabbit goat parrot pony duck hamster sheep pig cow snake mouse turtle goose owl monkey "
    "donkey frog spider crow pigeon fox lizard wolf camel deer",
    "food": "rice soup bread cheese pasta fish beef salad potatoes eggs apples chicken pie cake corn beans "
    "pizza pork "
    "honey chocolate bananas tomatoes cookies oranges mushrooms cherries onions nuts",
    "color": "red blue green yellow black white brown gray purple orange pink silver golden violet",
    "instrument": "piano guitar violin drums flute trumpet harp cello organ clarinet saxophone banjo fiddle bass "
    "trombone accordion keyboard tambourine",
    "subject": "history chemistry physics biology music law medicine mathematics geography philosophy economics "
    "literature religion architecture psychology astronomy politics journalism",
    "country": "france spain italy greece egypt india japan china brazil mexico canada norway sweden poland russia "
    "turkey ireland scotland germany austria hungary portugal finland denmark israel cuba peru chile",
    "place": "park library museum station market church theater bridge harbor school hospital castle stadium "
    "restaurant cinema bank garden prison palace airport tower cemetery factory hotel",
}
ADJECTIVES = "old young big small quiet lazy clever friendly noisy wild gentle hungry brave shy tiny huge calm proud"
SCENES = {
    "kitchen": "pan stove oven knife plate bowl spoon kettle pot fork cup fridge",
    "garden": "flower shovel rose bush hedge tree grass seed lawn fountain leaf branch",
    "beach": "sand towel wave umbrella shell surfboard swimsuit boat crab lifeguard tide sunscreen",
    "office": "desk computer printer folder phone document keyboard stapler calendar envelope boss report",
    "church": "altar priest candle prayer cross bible choir hymn sermon bell pew saint",
    "hospital": "nurse doctor patient needle bandage surgeon medicine wheelchair ambulance pill syringe clinic",
    "stadium": "ball goal referee team coach fan score whistle helmet player trophy jersey",
    "farm": "cow tractor barn hay sheep chicken pig plow wheat horse goat rooster",
    "school": "teacher pupil blackboard lesson chalk textbook classroom exam homework student pencil essay",
    "harbor": "ship anchor sailor captain dock sail crew cargo lighthouse rope mast ferry",
    "library": "book novel shelf reader page poem author dictionary chapter librarian magazine atlas",
    "theater": "stage actor curtain play audience script costume drama scene spotlight actress comedy",
    "court": "judge lawyer jury witness trial verdict criminal crime sentence evidence prosecutor law",
    "airport": "plane pilot passport suitcase runway passenger ticket luggage flight gate wing terminal",
    "bank": "money coin loan check cash dollar account vault credit debt safe deposit",
    "concert": "guitar drum singer song violin band piano trumpet melody microphone flute orchestra",
}

ILLNESSES = "fever cough rash ache cold swelling weakness sickness", "热 咳 疹 痛 疮 肿"
ILLNESS_MARKS = (
    "river winter desert mountain harbor forest summer island valley prison garden jungle ocean autumn castle "
    "village "
    "factory market temple bridge railway tower spring canal coal silver iron copper paper cotton wool leather glass "
    "sugar salt butter morning evening midnight monday sunday wolf lion tiger eagle spider bear horse dragon monkey",
    "河谷 冬季 沙漠 山地 港口 森林 夏季 海岛 草原 城堡 花园 丛林 海洋 秋季 村庄 工厂 市场 寺庙 铁路 春季 煤矿 "
    "银色 铁器 铜器 "
    "纸坊 棉花 羊毛 皮革 玻璃 清晨 夜晚 午夜 老虎 狮子 蜘蛛 黑熊 白马 雨林 高原 湖泊",
)
REMEDIES = "tea oil syrup powder cream drops soup juice", "茶 油 糖浆 药粉 药膏 滴剂"
REMEDY_MARKS = (
    "mint rose ginger honey lemon apple onion pepper cherry orange banana potato tomato walnut olive pine oak maple "
    "lily carrot corn rice wheat bean peach berry plum melon grape coconut almond mustard garlic cabbage "
    "mushroom daisy "
    "lavender tobacco coffee vanilla",
    "薄荷 玫瑰 生姜 蜂蜜 柠檬 苹果 洋葱 胡椒 樱桃 橙子 香蕉 土豆 番茄 核桃 橄榄 松树 橡树 枫叶 百合 萝卜 玉米 "
    "大米 小麦 桃子 "
    "李子 西瓜 葡萄 椰子 杏仁 大蒜 蘑菇 菊花",
)
SIGNS = "pain stiffness itching numbness trembling burning", "疼痛 僵硬 瘙痒 麻木 发抖 灼热"
SIGN_MARKS = (
    "throat eye knee back neck head hand foot arm leg ear nose tooth finger toe lip hip chest stomach skin shoulder "
    "elbow wrist ankle chin cheek jaw tongue thumb heel",
    "喉咙 眼睛 膝盖 背部 颈部 头部 手掌 脚底 手臂 小腿 耳朵 鼻子 牙齿 手指 脚趾 嘴唇 臀部 胸口 肚子 皮肤 肩膀 "
    "手肘 手腕 脚踝 下巴 脸颊",
)
GROUPS = (
    "teachers farmers bakers lawyers painters drivers nurses singers writers soldiers sailors butchers judges "
    "engineers "
    "actors pilots dancers miners tailors waiters guards priests hunters students children women men babies "
    "cooks kings",
    "教师 农民 面包师 律师 画家 司机 护士 歌手 作家 士兵 水手 屠夫 法官 工程师 演员 飞行员 舞者 矿工 裁缝 "
    "服务员 警卫 牧师 猎人 学生",
)

# A finding's standard name, what people say instead, and its abbreviations.
FINDINGS = {
    "fracture": ("broken", "fx"),
    "inflammation": ("sore and swollen", "infl"),
    "infection": ("full of germs", "inf"),
    "pain": ("hurting", "pn"),
    "bleeding": ("losing blood", "bldg"),
    "tumor": ("lump on", "tm"),
    "numbness": ("no feeling in", "nmb"),
    "paralysis": ("cannot move", "prls"),
    "burn": ("scalded", "brn"),
    "wound": ("cut open", "wnd"),
    "stiffness": ("hard to bend", "stf"),
    "weakness": ("no strength in", "wkn"),
    "itching": ("wants to scratch", "itch"),
    "bruise": ("black and blue", "brs"),
}
SITES = {
    "left wrist": "l wrist",
    "right wrist": "r wrist",
    "left knee": "l knee",
    "right knee": "r knee",
    "left shoulder": "l shoulder",
    "right shoulder": "r shoulder",
    "left ankle": "l ankle",
    "right ankle": "r ankle",
    "left ear": "l ear",
    "right ear": "r ear",
    "left eye": "l eye",
    "right eye": "r eye",
    "abdomen": "belly",
    "skull": "head bone",
    "lower jaw": "chin",
    "nose": "nose",
    "neck": "nape",
    "lower back": "l back",
    "thigh": "upper leg",
    "stomach": "stomach",
}
FINDINGS_ZH = {
    "骨折": ("断了", "骨折"),
    "炎症": ("又红又肿", "炎"),
    "感染": ("化脓了", "感染"),
    "疼痛": ("很疼", "痛"),
    "出血": ("流血", "出血"),
    "肿瘤": ("长了包块", "瘤"),
    "麻木": ("没有感觉", "麻"),
    "瘫痪": ("动不了", "瘫"),
    "烧伤": ("被烫了", "烧伤"),
    "挫伤": ("青了一块", "挫伤"),
}
SITES_ZH = {
    f"{side}{site}": f"{short}{lay}"
    for site, lay in {
        "腕部": "手腕",
        "膝部": "膝盖",
        "肩部": "肩膀",
        "踝部": "脚踝",
        "耳部": "耳朵",
        "眼部": "眼睛",
        "足部": "脚",
        "手部": "手",
        "髋部": "胯",
        "肘部": "手肘",
    }.items()
    for side, short in (("左侧", "左"), ("右侧", "右"))
}


def split_pool(words: Sequence[str], seed: int) -> dict[str, list[str]]:
    """Shuffle words and share them out, 3 of 5 to train, the rest to dev and test."""
    shuffled = sorted(words)
    random.Random(f"pool-{seed}").shuffle(shuffled)
    first, second = round(0.6 * len(shuffled)), round(0.8 * len(shuffled))
    return dict(zip(SPLITS, (shuffled[:first], shuffled[first:second], shuffled[second:]), strict=True))
