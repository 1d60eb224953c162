"""Arguments in the types of their schemas, by tables of JSON Schema."""

import pytest

from tramontane.environments.arguments import coerced, fault_of, inlined, kinds_of, typed
from tramontane.types import ToolCall

INT, TEXT = {"type": "integer"}, {"type": "string"}
NUMBERS = {"type": "array", "items": INT}


def same(found, wanted):
    """Equal, and of the same types: 1, 1.0 and True are three values."""
    return repr(found) == repr(wanted)


@pytest.mark.parametrize(
    ("value", "schema", "wanted"),
    [
        # Floats.
        (7.0, INT, 7),
        (7.5, INT, 7.5),
        (7.0, {"type": ["integer", "number"]}, 7.0),
        (7.0, {"type": "number"}, 7.0),
        (7.0, TEXT, 7.0),
        (7.0, {}, 7.0),
        # Texts of one type.
        (" 7 ", INT, 7),
        ("7.0", INT, 7),
        ("7.5", INT, "7.5"),
        ("1e2", INT, 100),
        ("7", {"type": "number"}, 7),
        ("7.0", {"type": "number"}, 7.0),
        ("7.0", {"type": "null"}, "7.0"),
        ("true", INT, "true"),
        ("true", {"type": "number"}, "true"),
        (" TRUE ", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("True", {"type": "array"}, "True"),
        ("None", {"type": "null"}, None),
        ("7", {}, "7"),
        ("7", {"type": "decimal"}, "7"),  # no type of JSON Schema
        # Texts of several types.
        ("7", {"type": ["string", "integer"]}, "7"),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": ["string", "null"], "enum": ["a", None]}, None),
        ("a", {"type": ["string", "null"], "enum": ["a", None]}, "a"),
        ("null", {"type": ["string", "null"], "enum": ["null", None]}, "null"),
        ("7", {"type": ["string", "integer"], "const": "7"}, "7"),
        ("7", {"anyOf": [TEXT, INT]}, "7"),
        ("7", {"anyOf": [{"const": "7"}, INT]}, "7"),
        ("7", {"anyOf": [{"const": "x"}, INT]}, 7),
        ("x", {"anyOf": [{"const": "x"}, INT]}, "x"),
        ("null", {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, None),
        ("3", {"type": ["string", "integer"], "format": "date"}, "3"),
        # Parts that were read from a text are read as well.
        ('["1", 2.0]', NUMBERS, [1, 2]),
        ("{'a': '1'}", {"type": "object", "properties": {"a": INT}}, {"a": 1}),
        ("(1, 2)", NUMBERS, "(1, 2)"),
        ("[[1e999]]", {"type": "array"}, "[[1e999]]"),
        ('{"a": 1e999}', {"type": "object"}, '{"a": 1e999}'),
        ("[(1, 1e999)]", {"type": "array"}, "[(1, 1e999)]"),
        ("[{1e999}]", {"type": "array"}, "[{1e999}]"),
        ("[1.5, 'x']", {"type": "array"}, [1.5, "x"]),
        # Other values.
        (True, INT, True),
        (None, INT, None),
        (7, TEXT, 7),
    ],
)
def test_a_value_is_read_in_the_type_of_its_schema(value, schema, wanted):
    assert same(coerced(value, schema), wanted)


@pytest.mark.parametrize(
    ("value", "schema", "wanted"),
    [
        (["1", "2", "3"], {"type": "array", "prefixItems": [TEXT], "items": INT}, ["1", 2, 3]),
        (["1"], {"type": "array", "prefixItems": [INT, TEXT], "items": INT}, [1]),
        (["1", "2"], {"type": "array", "prefixItems": [INT]}, [1, "2"]),
        ([["1"]], {"type": "array", "items": NUMBERS}, [[1]]),
        ({"a": "1", "b": "2"}, {"type": "object", "properties": {"a": INT}}, {"a": 1, "b": "2"}),
        ({"a": "1", "b": "2"},
         {"type": "object", "properties": {"a": TEXT}, "additionalProperties": INT},
         {"a": "1", "b": 2}),
        ({"a": "1"}, {"type": "object", "additionalProperties": False}, {"a": "1"}),
        ({"a": "1"}, {"properties": {"a": INT}}, {"a": 1}),  # without a type
        # A schema for another type says nothing about parts.
        ({"a": "1"}, {"type": "string", "properties": {"a": INT}}, {"a": "1"}),
        (["1"], {"type": ["string", "null"], "items": INT}, ["1"]),
        (["1"], {"type": ["array", "null"], "items": INT}, [1]),
        # Of several schemas for the type, the first that has the properties, or the first.
        ({"b": "2"}, {"anyOf": [{"type": "object", "properties": {"a": INT}},
                                {"type": "object", "properties": {"b": INT}}]}, {"b": 2}),
        ({"a": "1"}, {"anyOf": [{"type": "object"}, {"type": "object", "properties": {"a": INT}}]},
         {"a": 1}),
        ({"a": "1", "c": "2"}, {"oneOf": [TEXT, {"type": "object", "properties": {"a": INT}},
                                          {"type": "object", "properties": {"b": INT}}]},
         {"a": 1, "c": "2"}),
        (["1"], {"anyOf": [{"type": "object", "items": TEXT}, {"allOf": [NUMBERS]}]}, [1]),
        (["1"], {"anyOf": [NUMBERS, {"type": "array", "items": TEXT}]}, [1]),
        ([["1"]], {"anyOf": [{"type": "array", "items": NUMBERS}, INT]}, [[1]]),
    ],
)  # fmt: skip
def test_the_parts_of_a_value_are_read(value, schema, wanted):
    assert same(coerced(value, schema), wanted)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("7", 7),
        (" null ", None),
        ("true", True),
        (" x ", " x "),
        ('"a"', '"a"'),
        ("[1]", "[1]"),
        ("1e999", "1e999"),
    ],
)
def test_as_text_what_reads_as_another_of_the_types_is_that(value, wanted):
    schema = {"type": ["string", "integer", "boolean", "null"]}
    assert same(coerced(value, schema, as_text=True), wanted)
    assert same(coerced([value], {"type": "array", "items": schema}, as_text=True), [wanted])
    fields = {"type": "object", "properties": {"a": schema}}
    assert same(coerced({"a": value}, fields, as_text=True), {"a": wanted})
    assert same(coerced(value, schema), value)
    assert same(coerced(value, TEXT, as_text=True), value)
    assert coerced("7", {"type": ["string", "integer"]}, as_text=True) == 7


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({}, set()),
        (INT, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "string", "nullable": False}, {"string"}),
        ({"anyOf": [INT, {"oneOf": [TEXT, True]}], "type": "null"}, {"integer", "string", "null"}),
        ({"allOf": [NUMBERS]}, {"array"}),
        ({"enum": ["a", None]}, {"string", "null"}),
        ({"enum": [1]}, {"integer", "number"}),
        ({"enum": [1.5, {}]}, {"number", "object"}),
        ({"const": True}, {"boolean"}),
        ({"const": None}, {"null"}),
        ({"const": [], "enum": [1]}, {"array"}),
        ({"type": "string", "enum": [1]}, {"string"}),
    ],
)
def test_the_types_that_a_schema_takes(schema, kinds):
    assert kinds_of(schema) == kinds


def test_calls_of_tools_that_nobody_described_stay_as_they_are():
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": INT}}}},
        {"type": "function", "function": {"name": "bare"}},
    ]
    made = [ToolCall(name, {"a": "1", "b": "2"}, "") for name in ("f", "bare", "other")]
    typed(made, tools, as_text=True)
    assert [call.arguments["a"] for call in made] == [1, "1", "1"]
    assert {call.arguments["b"] for call in made} == {"2"}
    tools[0]["function"]["parameters"]["properties"]["b"] = {"type": ["string", "integer"]}
    for as_text in (False, True):
        typed(made, tools, as_text=as_text)
        assert made[0].arguments["b"] == (2 if as_text else "2")


A = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"items": A, "$defs": {"A": INT}}, {"items": INT}),
        ({"items": {"$ref": "#/definitions/A"}, "definitions": {"A": INT}}, {"items": INT}),
        # What stands next to a reference is kept, and wins.
        ({"items": A | {"description": "d", "minimum": 2}, "$defs": {"A": INT | {"minimum": 1}}},
         {"items": INT | {"description": "d", "minimum": 2}}),
        ({"items": A | {"not": {"$ref": "#/$defs/B"}}, "$defs": {"A": INT, "B": TEXT}},
         {"items": INT | {"not": TEXT}}),
        ({"anyOf": [A, [A]], "$defs": {"A": INT}}, {"anyOf": [INT, [INT]]}),
        # A property or a schema may have the name of a keyword.
        ({"properties": {"title": A, "$defs": INT, "definitions": A}, "$defs": {"A": INT}},
         {"properties": {"title": INT, "$defs": INT, "definitions": INT}}),
        ({"patternProperties": {"title": INT}, "dependentSchemas": {"title": INT}},
         {"patternProperties": {"title": INT}, "dependentSchemas": {"title": INT}}),
        *(({"title": "T", key: {"title": 1, "$ref": "#"}}, {key: {"title": 1, "$ref": "#"}})
          for key in ("const", "default", "enum", "examples")),
        # References to nothing, to another document, or by no text.
        ({"items": {"$ref": "#/$defs/B"}, "$defs": {"A": INT}}, {"items": {}}),
        ({"items": {"$ref": "#/type/A"}, "type": "array"}, {"items": {}, "type": "array"}),
        ({"items": {"$ref": "other.json/$defs/A"}, "$defs": {"A": INT}}, {"items": {}}),
        ({"items": {"$ref": 3}}, {"items": {"$ref": 3}}),
        # Circles: of a whole document, of two definitions, and beside a reference.
        ({"properties": {"next": {"$ref": "#"}}},
         {"properties": {"next": {"properties": {"next": {}}}}}),
        ({"items": A, "$defs": {"A": {"items": {"$ref": "#/$defs/B"}}, "B": {"not": A}}},
         {"items": {"items": {"not": {}}}}),
        ({"items": A, "$defs": {"A": {"anyOf": [A, INT]}}}, {"items": {"anyOf": [{}, INT]}}),
        ({"items": A, "$defs": {"A": {"$ref": "#/$defs/B", "not": A}, "B": INT}},
         {"items": INT | {"not": {}}}),
    ],
)  # fmt: skip
def test_references_are_replaced_by_what_they_name(schema, wanted):
    assert inlined(schema) == wanted


def test_a_schema_that_is_none_is_said_with_its_place():
    assert fault_of({"type": "object", "properties": {"a": INT}}) == ""
    assert fault_of({"type": "whole"}).startswith("type: 'whole' is not ")
    found = fault_of({"properties": {"a": {"pattern": "("}}})
    assert found == "properties.a.pattern: '(' is not a 'regex'"
    # Draft 4 takes a truth value where later ones want a number.
    older = {"$schema": "http://json-schema.org/draft-04/schema#"}
    assert fault_of({"minimum": 1, "exclusiveMinimum": True} | older) == ""
    assert fault_of({"minimum": 1, "exclusiveMinimum": True})
    nested: dict = {}
    for _ in range(180):  # what pydantic reads of a request
        nested = {"not": nested}
    assert fault_of(nested) in ("", ": nested too deeply")
