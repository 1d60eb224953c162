"""Short sentences, names of programs' variables and words of one alphabet keep their language; what
another language says in as few words is still seen."""

import pytest

from tramontane.verifier.language import consistent

PROBLEMS = {
    "pt": "Quantos inteiros são pares ou múltiplos de 3?",
    "uk": "Скільки цілих чисел є парними?",
    "bg": "Колко цели числа са четни?",
    "ko": "짝수인 정수는 몇 개입니까?",
    "th": "มีจำนวนเต็มคู่กี่จำนวน",
    "hi": "कितने पूर्णांक सम हैं?",
    "tr": "Kaç tam sayı çifttir?",
    "cs": "Kolik celých čísel je sudých?",
    "nl": "Hoeveel gehele getallen zijn even?",
    "id": "Berapa banyak bilangan bulat yang genap?",
    "zh": "有多少个偶数？",
    "ru": "Сколько чисел чётны?",
    "ja": "偶数は何個ありますか。",
}
NATIVE = [
    ("pt", "Do vértice A traçamos a perpendicular a BC. Como AB = 5 cm, temos AH = 4 cm."),
    ("pt", "Sabendo que o triângulo é retângulo, usamos o teorema de Pitágoras."),
    ("pt", "Chamemos de x o número de alunos. Temos 2x + 3 = 11, daí x = 4."),
    ("pt", "Considere a reta r. Ela corta o eixo y em 3."),
    ("pt", "Logo.. n = 3, certo?"),
    ("pt", "O perímetro mede 12 cm e a área 9 cm²."),
    ("uk", "Том купив 3 kg яблук."),
    ("uk", "Отже, сума 3 + 4 = 7."),
    ("bg", "Броим четните числа и получаваме три."),
    ("ko", "음, n=1은 안 된다. n=2는 된다. 좋아."),
    ("ko", "좋아. 셋."),
    ("th", "ได้ 3"),
    ("hi", "ठीक है।"),
    ("tr", "Çift sayıları sayarız ve üç elde ederiz."),
    ("cs", "Spočítáme sudá čísla a dostaneme tři."),
    ("nl", "De oppervlakte is 9 cm², dus de zijde is 3 cm."),
    ("id", "Kita hitung bilangan genap dan memperoleh tiga."),
    ("zh", "用 DFS 或 BFS 都可以，时间复杂度 O(n log n)。最后 return ans 即可。"),
    ("zh", "使用 numpy 和 pandas 计算，得到 mean 为 3。"),
    ("ru", "Используем DFS, сложность O(n log n), затем return ans."),
    ("ja", "DFS を使うと計算量は O(n log n) です。最後に return ans とします。"),
]
FOREIGN = [
    ("pt", "Primero contamos los pares y luego sumamos."),
    ("pt", "Contamos i numeri pari e poi sommiamo tutto."),
    ("pt", "Count the evens. Get three."),
    ("pt", "Also sind es drei."),
    ("uk", "Значит, это всё, их три."),
    ("bg", "Рахуємо парні числа й отримуємо три."),
    ("ko", "まず偶数を数えます。三つです。"),
    ("th", "Count the evens. Get three."),
    ("tr", "Let us count the even numbers carefully. There are three of them."),
    ("cs", "Comptons les nombres pairs avec soin. Il y en a trois."),
    ("nl", "Also sind es drei."),
    ("id", "We add two and one."),
    ("zh", "we count 偶 then add 三 and get the answer 三"),
    ("zh", "Count evens。Then add。So the answer is three。"),
    ("ru", "Порахуємо парні числа. Їх рівно три, отже відповідь три."),
    ("ja", "Count evens。Then add。So the answer is three。"),
]


@pytest.mark.parametrize(("language", "thoughts"), NATIVE)
def test_short_native_thoughts_agree(language, thoughts):
    for declared in (language, None):
        assert consistent(PROBLEMS[language], thoughts, r"\boxed{3}", declared)


@pytest.mark.parametrize(("language", "thoughts"), FOREIGN)
def test_short_foreign_thoughts_do_not(language, thoughts):
    for declared in (language, None):
        assert not consistent(PROBLEMS[language], thoughts, r"\boxed{3}", declared)
