# ruff: noqa: RUF001  (look-alike characters are what some cases are about)
r"""Pairs of a gold answer and a completion, with the verdict worked out by hand: 1 is right, 0 is wrong.

Where taste decides, a comment says what was chosen; docs/rewards.md says it to users.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from covey.rewards import symbolic
from covey.rewards.math_answer import score

PROSE = " This follows because every step above was checked twice, by hand." * 8
Pairs = list[tuple[object, str, int]]

# Reported by users of other graders.
REPORTED: Pairs = [
    ("6400", r"\boxed{$6{,}400}", 1),
    ("3000", r"\boxed{3,000}", 1),
    ("1234.5", "total is $1,234.50.", 1),  # the full stop is no part of the number
    ("56", "That makes 56 beads, all told.", 1),
    ("18", "#### 18", 1),
    ("18", "#### $18.00", 1),
    ("18", "####18", 1),
    ("42", "#### 42" + PROSE, 1),
    ("42", "#### 42\n" + PROSE, 1),
    ("18", r"so \boxed{17}; no, one was missed, \boxed{18}", 1),
    ("17", r"so \boxed{17}; no, one was missed, \boxed{18}", 0),
    ("1/2", r"\boxed{\frac{1}{2}}", 1),
    ("1/2", r"\dfrac12", 1),
    ("1/2", "0.5", 1),
    ("1/2", ".5", 1),
    ("1/3", r"\boxed{0.33}", 0),
    ("1/3", r"\boxed{0.333333}", 0),  # there is no tolerance
    ("√2/2", r"\boxed{\frac{\sqrt{2}}{2}}", 1),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{\sqrt{2}}{2}}", 1),
    ("1/2", r"\boxed{\frac{1}{2}", 0),  # never closed: cut off
    ("1/2", r"\boxed{}", 0),
    ("1/2", "", 0),
    ("−7", r"\boxed{-7}", 1),
    ("−7", r"\boxed{−7}", 1),
    ("-7", r"\boxed{−7}", 1),
    ("−7", r"\boxed{7}", 0),
    ("75", r"\boxed{75\%}", 1),
    ("0.75", r"\boxed{75\%}", 1),
    ("7.5", r"\boxed{75\%}", 0),
    ("18", r"\boxed{18\text{ apples}}", 1),
    ("18", r"18 \text{ cm}^2", 1),
    ("10", "Answer: 10", 1),
    ("1", "Answer: 10", 0),
    ("250000", r"2.5\times 10^5", 1),
    ("250000", "2.5e5", 1),
    ("250000", r"\boxed{2.5e5}", 1),
    ("64", r"\boxed{６４}", 1),
    ("64", "答案是64。", 1),
    ("58", "Result: **58**", 1),
    ("1/500!", r"\frac{1}{502!}", 0),
    (r"\frac{1}{500!}", r"\boxed{\frac{1}{500!}}", 1),
    ("3^−70", "3^{-69}", 0),
    ("3^{-70}", "3^{-70}", 1),
    ("15", r"\pm 15", 0),
    ("15", r"\boxed{\pm 15}", 0),
    ("(1,2)", "(2,1)", 0),
    ("(1,2)", "(1,2)", 1),
    ("{1,2}", "{2,1}", 1),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
    ("9:30", "3:30", 0),
    ("9:30", "9:30", 1),
]

FRACTIONS: Pairs = [
    ("3/4", r"\boxed{\frac{6}{8}}", 1),
    ("3/4", "75/100", 1),
    ("3/4", "4/3", 0),
    ("-3/4", r"\boxed{-\dfrac{3}{4}}", 1),
    ("-3/4", r"\boxed{\frac{-3}{4}}", 1),
    ("-3/4", r"\boxed{\frac{3}{-4}}", 1),
    ("1/3", r"\frac13", 1),
    ("13", r"\frac13", 0),
    ("2", r"\boxed{\frac{4}{2}}", 1),
    ("1/2", r"\boxed{\frac{1}{2}x}", 0),
    (0.5, r"\boxed{\tfrac{1}{2}}", 1),
    ("0.125", r"\boxed{\frac{1}{8}}", 1),
    ("1.5", r"\boxed{1\frac{1}{2}}", 1),
    ("1.5", "1 1/2", 1),
    ("5.5", "1 1/2", 0),
    ("11/2", "1 1/2", 0),
    ("7/3", r"\boxed{2\frac{1}{3}}", 1),
    ("-7/3", r"\boxed{-2\frac{1}{3}}", 1),  # -(2 + 1/3)
    ("-5/3", r"\boxed{-2\frac{1}{3}}", 0),  # not -2 + 1/3
    ("-7/3", "-2 1/3", 1),
    ("2/3", r"\boxed{2\frac{1}{3}}", 0),  # not 2 times 1/3
    ("½", "0.5", 1),
    ("5/6", "I got 5/6", 1),
    ("5", "I got 5/6", 0),
    ("1/7", r"\boxed{0.142857142857}", 0),
    ("1/3", r"\boxed{0.\overline{3}}", 1),
    ("1/6", r"0.1\overline{6}", 1),
    ("0.3", r"0.\overline{3}", 0),
    ("1", r"0.\overline{9}", 1),
    (r"12.\overline{34}", r"\boxed{\frac{1222}{99}}", 1),  # 12 + 34/99
    ("1/2", r"\boxed{1:2}", 0),  # a ratio is not a number
    ("1:2", r"\boxed{1 : 2}", 1),
]

PERCENT: Pairs = [
    ("75%", "0.75", 1),
    ("75%", "75", 1),  # a bare number may be the percentage or the share
    ("75%", r"0.75\%", 0),
    ("50%", "50 percent", 1),
    ("50%", "0.5 percent", 0),
    ("12.5%", r"\boxed{\frac{1}{8}}", 1),
    ("12.5%", r"\boxed{\frac{25}{2}\%}", 1),
    ("150%", "1.5", 1),
    ("1%", "100%", 0),
    ("0.2", "20%", 1),
    ("2", "20%", 0),
    ("1/3", r"\boxed{33\frac{1}{3}\%}", 1),
    ("1/3", r"\boxed{33.3\%}", 0),
    ("0.75", "７５％", 1),
]

UNITS: Pairs = [
    ("90", r"\boxed{90^\circ}", 1),
    ("90", "90°", 1),
    ("90 degrees", r"\boxed{90^\circ}", 1),
    ("-5", "The temperature is -5°C.", 1),
    ("18", r"\boxed{18\;\mathrm{cm}}", 1),
    ("18 km", r"\boxed{18}", 1),
    ("18 cm", r"\boxed{18\text{ cm}}", 1),
    ("18 cm", r"\boxed{18\text{ m}}", 0),
    ("18 cm", "18 centimeters", 1),
    ("18 centimetres", "18 cm", 1),
    ("18 cm", r"\boxed{18\text{ cm}^2}", 0),
    ("18 cm^2", "18 square centimeters", 1),
    ("5 km/h", "5 m/s", 0),
    ("5 km/h", r"\boxed{5\text{ km per hour}}", 1),
    ("3 hours", "3 minutes", 0),
    ("3 hours", "3 hrs", 1),
    ("2 kg", "2000 g", 0),  # units are compared, not converted
    ("9 am", "9 pm", 0),
    ("60 mph", "60 km/h", 0),
    ("5", "\\boxed{5 m/s}", 1),
    ("12 apples", "12 oranges", 1),  # only units of measurement are compared
    ("36", "3 dozen eggs", 1),
    ("5000000", r"\boxed{5\text{ million dollars}}", 1),
    ("5", r"\boxed{5\text{ million}}", 1),
    ("50", r"\boxed{5\text{ million}}", 0),
    ("5 million", "5 billion", 0),
    ("1000", "$1,000", 1),
    ("1000", r"\boxed{\$1{,}000.00}", 1),
    ("20", "It takes 20 minutes.", 1),
    ("10", "10 out of 20", 0),
]

THOUSANDS: Pairs = [
    ("1234567", "1,234,567", 1),
    ("1234567", r"\boxed{1\,234\,567}", 1),
    ("1234567", "1\u202f234\u202f567", 1),
    ("10000", r"\boxed{10 000}", 1),
    ("12345", "12,345.00", 1),
    ("1234567", "1,234,576", 0),
    ("1234", "1,2345", 0),
    ("1234", "1 2345", 0),
    ("12", "1 2", 0),
    ("1234", "1.234", 0),  # a point is never a separator
    ("1234.5", "1.234,5", 0),
    ("0.5", "0,5", 0),  # and a comma never a decimal point
    ("100000", "1,00,000", 0),
    ("1234", "(1,234)", 0),  # a pair
    ("11", "1011_2", 1),  # a number in base 2
    ("1011_2", "1011_3", 0),
    ("1011_2", r"\boxed{1011_{2}}", 1),
    ("1011_2", "1011", 0),
]

FULL_WIDTH: Pairs = [
    ("１，２３４", "1234", 1),
    ("1234.5", r"\boxed{１，２３４．５}", 1),
    ("-7", r"\boxed{－７}", 1),
    ("1/2", "１／２", 1),
    ("(1,2)", r"\boxed{（１，２）}", 1),
    ("(1,2)", r"\boxed{（２，１）}", 0),
    ("64", "答案：６４。", 1),
    ("٤٢", "42", 1),
    ("42", r"\boxed{४२}", 1),
    ("42", r"\boxed{४३}", 0),
]

SCIENTIFIC: Pairs = [
    ("0.00025", "2.5e-4", 1),
    ("0.00025", r"\boxed{2.5 \times 10^{-4}}", 1),
    ("250000", r"\boxed{2.5\cdot 10^5}", 1),
    ("250000", "2.5*10^5", 1),
    ("250000", "2.5 x 10^5", 1),
    ("250000", "2.5×10⁵", 1),
    ("250000", "2.5E+5", 1),
    ("250000", r"\boxed{2.5\times 10^4}", 0),
    ("3e8", r"\boxed{300{,}000{,}000}", 1),
    ("6.02e23", r"6.02\times10^{23}", 1),
    ("6.02e23", r"6.02\times10^{22}", 0),
    ("1e-9", "2e-9", 0),
    ("1e-300", "1e-301", 0),
    ("0", "1e-300", 0),
    ("1000", r"\boxed{10^3}", 1),
    ("2e", r"\boxed{2e}", 1),  # Euler's number
    ("2e", r"\boxed{2}", 0),
]

SIZES: Pairs = [
    ("1/500!", r"\boxed{1/500!}", 1),
    ("1/500!", r"\boxed{\frac{1}{501!}}", 0),
    ("1/502!", r"\boxed{\frac{1}{500!}}", 0),
    ("1/500!", r"\boxed{0}", 0),
    ("0", r"\boxed{\frac{1}{502!}}", 0),
    ("1/500!", r"\boxed{\frac{502 \cdot 501}{502!}}", 1),
    ("500!", r"\boxed{500 \cdot 499!}", 1),
    ("500!", r"\boxed{501!}", 0),
    ("2^{1000}", r"\boxed{4^{500}}", 1),
    ("2^{1000}", r"\boxed{2^{1000}+1}", 0),
    ("10^{-400}", r"\boxed{10^{-401}}", 0),
    ("e^{-500}", r"\boxed{e^{-500}}", 1),
    ("e^{-500}", r"\boxed{e^{-501}}", 0),
    (r"\frac{\pi}{500!}", r"\boxed{\frac{\pi}{502!}}", 0),
    (r"\frac{\sqrt{2}}{500!}", r"\boxed{\frac{\sqrt{2}}{502!}}", 0),
    (r"\frac{x}{500!}", r"\boxed{\frac{x}{502!}}", 0),
    (r"x+\frac{1}{500!}", r"\boxed{x+\frac{1}{502!}}", 0),
    (r"x+\frac{1}{500!}", r"\boxed{\frac{1}{500!}+x}", 1),
    (r"(\frac{1}{500!}, 2)", r"\boxed{(\frac{1}{502!}, 2)}", 0),
    (r"\{\frac{1}{500!}, 2\}", r"\boxed{\{\frac{1}{502!}, 2\}}", 0),
    (r"(0, \frac{1}{500!}) \cup (1, 2)", r"\boxed{(0, \frac{1}{502!}) \cup (1, 2)}", 0),
    (
        r"\begin{pmatrix}\frac{1}{500!}\\2\end{pmatrix}",
        r"\boxed{\begin{pmatrix}\frac{1}{502!}\\2\end{pmatrix}}",
        0,
    ),
    (r"x < \frac{1}{500!}", r"\boxed{x < \frac{1}{502!}}", 0),
    (r"\sqrt{10^{80}+1}", r"\boxed{10^{40}}", 0),
    ("0", r"\boxed{\frac{\sqrt{2}}{502!}}", 0),
    ("3x", r"\boxed{3.0000001x}", 0),
    ("9^{9^{9}}", r"\boxed{9^{9^{9}}}", 1),  # as text: it is too large to work out
    ("9^{9^{9}}", r"\boxed{9^{9^{8}}}", 0),
]

NUMBERS: Pairs = [
    ("-4", r"\boxed{-2^2}", 1),
    ("512", r"\boxed{2^{3^2}}", 1),
    ("64", r"\boxed{2^{3^2}}", 0),
    ("1024", "2^10", 1),
    ("120", r"\boxed{5!}", 1),
    ("90", r"\boxed{10!/8!}", 1),
    ("3", r"\boxed{3xy}", 0),
    ("10", r"\boxed{10x}", 0),
    ("3xy", r"\boxed{3ab}", 0),
    ("3xy", r"\boxed{3yx}", 1),
    ("7", r"\boxed{3 + 4 = 7}", 1),
    ("5", r"\boxed{x = 5}", 1),
    ("5", "so $x = 5$.", 1),
    ("0", r"\boxed{-0.0}", 1),
    ("5", r"\boxed{-(-5)}", 1),
    (18, "18.0", 1),
    ("8", "eight", 0),  # numbers in words are not read
    ("10", r"\boxed{x > 10}", 0),
    ("10", r"\boxed{>10}", 0),
    ("10", r"\boxed{x \neq 10}", 0),
    ("10", r"\boxed{\text{not } 10}", 0),
]

COLLECTIONS: Pairs = [
    ("(1,2)", r"\boxed{\{1,2\}}", 0),
    (r"\{1,2\}", r"\boxed{(1,2)}", 0),
    ("[1,2]", "(1,2)", 0),
    ("[1,2]", r"\boxed{\{1,2\}}", 0),
    ("(1,2)", "(1,2,3)", 0),
    ("1", r"\boxed{\{1\}}", 0),  # a set is not its element
    ("(1,234)", "(1, 234)", 1),
    ("[0,1)", r"\left[0, 1\right)", 1),
    ("[0,1)", "(0,1)", 0),
    (r"(-\infty, 3]", r"\boxed{(-\infty,3]}", 1),
    ("1, 2", r"\boxed{2, 1}", 1),  # a bare list has no order, like a set
    ("1, 2", r"\boxed{\{1, 2\}}", 1),
    ("1, 2", r"\boxed{2 \text{ and } 1}", 1),
    ("1, 2, 3", r"\boxed{1, 2 and 3}", 1),
    ("1, 2", r"\boxed{1}", 0),
    ("1, 2", r"\boxed{(1,2)}", 0),
    ("1, 1", r"\boxed{1, 2}", 0),
    ("(1/2, 3)", r"\boxed{\left(\frac{1}{2}, 3\right)}", 1),
    ("(1,2), (3,4)", r"\boxed{(3,4), (1,2)}", 1),
    ("(1,2), (3,4)", r"\boxed{(2,1), (3,4)}", 0),
    (r"\{(1,2),(3,4)\}", r"\boxed{\{(3,4),(1,2)\}}", 1),
    (r"\pm 15", r"\boxed{-15, 15}", 1),
    (r"\pm 3", r"\boxed{3}", 0),
    (r"\pm\sqrt{2}", r"\boxed{\sqrt{2}, -\sqrt{2}}", 1),
    (r"1 \pm \sqrt{2}", r"\boxed{1+\sqrt{2}, 1-\sqrt{2}}", 1),
    ("x = 1 or x = 2", r"\boxed{1, 2}", 1),
    ("x = 1, y = 2", r"\boxed{y = 2, x = 1}", 1),
    ("x = 1, y = 2", r"\boxed{x = 2, y = 1}", 0),
    ("x = 1, y = 2", r"\boxed{1, 2}", 0),  # of which name?
    ("1:2", r"\boxed{\cos\frac{\pi}{3}}", 0),
    ("9:30", r"\boxed{9:30\text{ a.m.}}", 0),
    ("9:30 PM", r"\boxed{9:30\text{ p.m.}}", 1),
    ("9:30 PM", r"\boxed{9:30\text{ a.m.}}", 0),
    ("(1,2)", r"(x,y) = (1,2)", 1),
    (r"\emptyset", r"\boxed{\varnothing}", 1),
    (r"\emptyset", r"\boxed{\{\}}", 1),
    (r"\emptyset", r"\boxed{\{0\}}", 0),
    (r"[1,2]\cup[3,4]", r"\boxed{[3,4]\cup[1,2]}", 1),
    (r"(-\infty,0)\cup(0,\infty)", r"\boxed{(-\infty,\infty)}", 0),
]

SYMBOLIC: Pairs = [
    ("18", r"\boxed{\sqrt{324}}", 1),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
    (r"2\sqrt{3}", "2sqrt(3)", 1),
    (r"2\sqrt{3}", r"the side is $2\sqrt{3}$ cm", 1),
    ("2", r"\boxed{2\sqrt{3}}", 0),
    ("2", r"2\sqrt{3}", 0),
    ("2π", r"\boxed{2\pi}", 1),
    ("2", r"\boxed{2\pi}", 0),
    (r"\frac{\pi}{4}", r"\boxed{\pi/4}", 1),
    (r"\frac{\pi}{4}", r"\boxed{\frac\pi4}", 1),
    (r"\pi", "3.14", 0),
    (r"\pi", r"\boxed{3.14159265358979}", 1),  # a decimal that agrees to 12 digits
    ("3.14", r"\boxed{\pi}", 0),
    (r"\sqrt{2}", r"\boxed{1.414214}", 0),
    (r"\frac{1}{\sqrt{3}}", r"\boxed{\frac{\sqrt{3}}{3}}", 1),
    (r"\frac{1+\sqrt{5}}{2}", r"\boxed{\frac{\sqrt{5}+1}{2}}", 1),
    (r"\frac{1+\sqrt{5}}{2}", r"\boxed{\frac{1-\sqrt{5}}{2}}", 0),
    (r"1+\sqrt{2}", r"\boxed{\sqrt{3+2\sqrt{2}}}", 1),
    (r"1+\sqrt{3}", r"\boxed{\sqrt{3+2\sqrt{2}}}", 0),
    (r"\frac{1+\sqrt{5}}{4}", r"\boxed{\cos\frac{\pi}{5}}", 1),
    (r"\sqrt[3]{2}", r"\boxed{2^{1/3}}", 1),
    ("2", r"\boxed{\sqrt[3]{8}}", 1),
    ("3", r"\boxed{\log_2 8}", 1),
    ("1/2", r"\boxed{\sin\frac{\pi}{6}}", 1),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
    ("x^2+2x+1", r"\boxed{(y+1)^2}", 0),
    ("x^2-1", r"\boxed{(x+1)(x-1)}", 1),
    ("x^2-1", r"\boxed{x^2+1}", 0),
    (r"\frac{n(n+1)}{2}", r"\boxed{n(n+1)/2}", 1),
    (r"\frac{x}{2}", r"\boxed{0.5x}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}", 0),
    (r"\sqrt{2}", r"\boxed{\sqrt{2} \text{ or } \sqrt{3}}", 0),
    ("0", r"\boxed{\sqrt{2}\sqrt{3}-\sqrt{6}}", 1),
    ("10", r"\boxed{\binom{5}{2}}", 1),
    ("2+3i", r"\boxed{3i+2}", 1),
    ("2+3i", r"\boxed{2-3i}", 0),
    ("p-q", r"\boxed{q-p}", 0),
    ("x<3", r"\boxed{(-\infty,3)}", 1),
    (r"(-\infty,3)", r"\boxed{x<3}", 1),
    ("x<3", r"\boxed{x>3}", 0),
    ("x<3", r"\boxed{x\le 3}", 0),
    ("x^2+y^2=1", r"\boxed{y^2+x^2=1}", 1),
    ("x^2+y^2=1", r"\boxed{x^2+y^2=2}", 0),
    ("1", r"\boxed{x^2+y^2=1}", 0),
    ("6", r"\boxed{3x = 6}", 0),
    ("2x+1", r"\boxed{f(x)=2x+1}", 1),
    ("y=3x+2", r"\boxed{3x+2}", 1),
    ("5", r"\boxed{\text{Area} = 2 + 3 = 5}", 1),
    (r"\infty", r"\boxed{-\infty}", 0),
    ("B", r"\boxed{\text{(B)}}", 1),
    ("B", r"\boxed{C}", 0),
    ("even", r"\boxed{\text{even}}", 1),
    ("even", r"\boxed{\text{odd}}", 0),
    ("Tuesday", r"\boxed{\text{tuesday}}", 1),
    ("Tuesday", "Answer: Tuesday", 1),
    ("Tuesday", "Answer: Sunday", 0),
]

# What counts as the final answer.
READING: Pairs = [
    ("18", r"<think>maybe \boxed{17}</think>So it is \boxed{18}.", 1),
    ("17", r"<think>maybe \boxed{17}</think>So it is \boxed{18}.", 0),
    ("18", r"<think>maybe \boxed{17}</think>The answer is 18.", 1),
    ("18", r"maybe \boxed{17}</think>18", 1),  # the chat template opened the block
    ("17", r"<think>maybe \boxed{17}", 0),  # it never came to an answer
    ("18", r"<think>so \boxed{18}</think>", 0),
    ("5", r"\boxed{5} and \boxed{}", 0),
    ("12", "The answer is $\\boxed{12}$.", 1),
    ("12", "Thus \\[ x = 12 \\]", 1),
    ("3", "The answer is 3, not 4.", 1),
    ("4", "The answer is 3, not 4.", 0),
    ("5", "In 2010 there were 5", 1),
    ("2010", "In 2010 there were 5", 0),
    ("18", r"\boxed{17 or 18}", 0),
    ("18", r"\boxed{17, 18}", 0),
    ("17", "The answer is 17 or 18.", 0),
    ("18", "The answer is 17 or 18.", 0),
    ("5", "x = 5 or x = 6", 0),
]

# What a model may try, or dress an answer in.
TRICKS: Pairs = [
    ("18", r"\boxed{17=18}", 0),  # nothing is said by what is false
    ("18", r"\boxed{x=17=18}", 0),
    ("8", r"\boxed{3 + 4 = 8}", 0),
    ("75", r"\boxed{\frac{3}{4} = 75\%}", 1),
    ("2.5", r"\boxed{x = \frac{5}{2} = 2.5}", 1),
    ("10/3", r"\boxed{\frac{10}{3} \approx 3.33}", 1),
    ("3.33", r"\boxed{\frac{10}{3} \approx 3.33}", 1),
    ("10/3", r"\boxed{x = \frac{10}{3} ≈ 3.33}", 1),
    ("3", r"\boxed{\frac{10}{3} \approx 3.33}", 0),
    ("17", r"\boxed{17 \approx 18}", 0),
    ("3.14", r"\boxed{\pi \approx 3.14}", 1),
    ("18", r"\boxed{17; 18}", 0),
    ("18", r"\boxed{17 | 18}", 0),
    ("18", r"\boxed{17 18}", 0),
    ("18", r"\boxed{17\quad 18}", 0),
    ("18", r"\boxed{\cancel{17}18}", 0),
    ("18", r"\boxed{\{1,2,\ldots,18\}}", 0),
    ("18", r"\boxed{n}", 0),
    ("A", r"\boxed{A, B, C, D}", 0),
    ("A", r"\boxed{ABCD}", 0),
    ("cat", "Answer: cat dog bird", 0),
    ("18", r"\boxed{\underline{18}}", 1),
    ("1/2", r"\boxed{\underline{\underline{\frac12}}}", 1),
    ("18", r"\boxed{\textcolor{red}{18}}", 1),
    ("18", r"\boxed{\color{red}18}", 1),
    ("18", "\\boxed{18\u200b}", 1),  # a space of no width
    ("18", "\ufeff18", 1),
    ("18", "\\boxed{\u202e81}", 0),  # shown from right to left
    ("18", "𝟏𝟖", 1),
    ("18", "①⑧", 0),
    ("18", r"\boxed{1⁸}", 0),
    (r"\sqrt{2}", r"\boxed{\sqrt{2}+e^{-1000}}", 0),
    (r"1+\sqrt{2}", r"\boxed{\sqrt{3+2\sqrt{2}}+e^{-1000}}", 0),
    ("1", r"\boxed{1+e^{-10000}}", 0),
    ("0", r"\boxed{\sin(10^{-400})}", 0),
    ("x", r"\boxed{\sqrt{x^2}}", 0),
]

MATH = [
    *REPORTED,
    *FRACTIONS,
    *PERCENT,
    *UNITS,
    *THOUSANDS,
    *FULL_WIDTH,
    *SCIENTIFIC,
    *SIZES,
    *NUMBERS,
    *COLLECTIONS,
    *SYMBOLIC,
    *READING,
    *TRICKS,
]


@pytest.mark.parametrize(("gold", "text", "right"), MATH)
def test_math(gold, text, right):
    assert score(gold, text) == right


def test_there_are_many_pairs_and_none_twice():
    assert len(MATH) > 350
    assert len({(str(gold), text) for gold, text, _ in MATH}) == len(MATH)


def test_threads_get_the_same_scores():
    """They share one worker, whose answers must not be mixed up."""
    symbolic.equal.cache_clear()
    rows = SIZES + COLLECTIONS + SYMBOLIC
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: [score(g, t) for g, t, _ in rows], range(4)))
    assert results == [[right for _, _, right in rows]] * 4
