// safetensors files: what is read, what is refused and why, and what is written.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>

#include "checkpoint_files.h"
#include "octile/checkpoint/checkpoint.h"
#include "octile/checkpoint/safetensors.h"

namespace octile::checkpoint {
namespace {

std::vector<std::byte> file_of(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::vector<std::byte> file(sizeof length + header.size() + data_bytes);
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + sizeof length, header.data(), header.size());
  for (std::size_t i = 0; i < data_bytes; ++i) file[sizeof length + header.size() + i] = static_cast<std::byte>(i);
  return file;
}

std::string entry(const std::string& name, const std::string& type, const std::string& shape,
                  const std::string& place) {
  return '"' + name + R"(":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" + place + "}";
}

// The error of a file; empty if it is read.
std::string error_of(const std::vector<std::byte>& file) {
  try {
    SafetensorsFile::parse(file, "f");
    return {};
  } catch (const FileError& error) {
    return error.what();
  }
}
std::string error_of(const std::string& header, std::size_t data_bytes) {
  return error_of(file_of(header, data_bytes));
}

TEST(SafetensorsReader, ReadsTensorsInTheOrderOfTheirBytes) {
  const auto file = file_of("{" + entry("b", "F32", "[2,1]", "[4,12]") + "," + entry("a", "I8", "[4]", "[0,4]") + "," +
                                entry("none", "F16", "[3,0]", "[4,4]") + "," + entry("one", "BOOL", "[]", "[12,13]") +
                                R"(,"__metadata__":{"format":"pt"}}   )",
                            13);
  const SafetensorsFile read = SafetensorsFile::parse(file, "f");
  ASSERT_EQ(read.tensors().size(), 4u);
  EXPECT_EQ(read.tensors()[0].name, "a");
  EXPECT_EQ(read.tensors()[1].name, "none");
  EXPECT_EQ(read.tensors()[2].name, "b");
  EXPECT_EQ(read.metadata(), (Metadata{{"format", "pt"}}));
  EXPECT_EQ(read.find("b")->shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(read.find("c"), nullptr);
  // In place: nothing is copied.
  EXPECT_EQ(read.bytes(*read.find("b")).data(), file.data() + file.size() - 9);
  EXPECT_EQ(read.bytes(*read.find("one")).size(), 1u);
}

TEST(SafetensorsReader, ReadsAnEmptyHeader) { EXPECT_EQ(error_of("{}", 0), ""); }

struct BadHeader {
  std::string header;
  std::size_t data_bytes;
  std::string says;  // part of the error
};

TEST(SafetensorsReader, RefusesHeaders) {
  const std::string a = entry("a", "F32", "[1]", "[0,4]");
  const std::string huge = "9223372036854775807";
  const BadHeader cases[] = {
      {"", 0, "does not begin with {"},
      {"[]", 0, "does not begin with {"},
      {"\xff\xfe", 0, "does not begin with {"},
      {"{", 0, "not JSON"},
      {"{" + a + "}x", 4, "not JSON"},
      {"{" + a + "}{}", 4, "not JSON"},
      {"{" + a + "}" + std::string("\0x", 2), 4, "not JSON (byte 55 is 0)"},
      {"{\"\xff\":1}", 4, "not JSON"},
      {"{" + a + "," + a + "}", 4, "\"a\" twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "\"__metadata__\" twice"},
      {R"({"__metadata__":{"x":"1","x":"2"}})", 0, "__metadata__ has \"x\" twice"},
      {R"({"__metadata__":{"x":1}})", 0, "a number where none belongs"},
      {R"({"__metadata__":{"x":{}}})", 0, "an object where none belongs"},
      {R"({"__metadata__":[]})", 0, "an array where none belongs"},
      {R"({"a":null})", 0, "null where none belongs"},
      {R"({"a":true})", 0, "a truth value where none belongs"},
      {R"({"a":"F32"})", 0, "a text where none belongs"},
      {R"({"a":{}})", 0, "\"a\": dtype is missing"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "shape is missing"},
      {R"({"a":{"dtype":"F32","shape":[1]}})", 4, "data_offsets is missing"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, "\"dtype\" appears twice"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4, "the field \"x\" is unknown"},
      {R"({"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}})", 4, "an array where none belongs"},
      {R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", 4, "an array where none belongs"},
      {R"({"a":{"dtype":"F32","shape":"1","data_offsets":[0,4]}})", 4, "a text where none belongs"},
      {R"({"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}})", 4, "a text where none belongs"},
      {"{" + entry("a", "F33", "[1]", "[0,4]") + "}", 4, "the type \"F33\" is unknown"},
      {"{" + entry("a", "f32", "[1]", "[0,4]") + "}", 4, "the type \"f32\" is unknown"},
      {"{" + entry("a", "F32", "[-1]", "[0,4]") + "}", 4, "-1 is negative"},
      {"{" + entry("a", "F32", "[1.5]", "[0,4]") + "}", 4, "1.5 is not a whole number"},
      {"{" + entry("a", "F32", "[1e2]", "[0,4]") + "}", 4, "1e2 is not a whole number"},
      {"{" + entry("a", "F32", "[99999999999999999999]", "[0,4]") + "}", 4, "is not a whole number in range"},
      {"{" + entry("a", "F32", "[9223372036854775808]", "[0,4]") + "}", 4, "9223372036854775808 is too large"},
      {"{" + entry("a", "F32", "[1]", "[0,4,4]") + "}", 4, "data_offsets has 3 numbers"},
      {"{" + entry("a", "F32", "[1]", "[]") + "}", 4, "data_offsets has 0 numbers"},
      {"{" + entry("a", "F32", "[1]", "[4,0]") + "}", 4, "data_offsets 4 to 0, but (1) of F32 has 4 bytes"},
      {"{" + entry("a", "F32", "[2]", "[0,4]") + "}", 4, "data_offsets 0 to 4, but (2) of F32 has 8 bytes"},
      {"{" + entry("a", "F4", "[3]", "[0,2]") + "}", 2, "does not end on a byte"},
      {"{" + entry("a", "F32", "[" + huge + ",2]", "[0,4]") + "}", 4, "has no size"},
      {"{" + entry("a", "U8", "[4294967296,4294967296]", "[0,0]") + "}", 0, "has no size"},
      {"{" + entry("a", "U8", "[4294967296,4294967296,0]", "[0,0]") + "}", 0, "has no size"},
      {"{" + entry("a", "U8", "[0,4294967296,4294967296]", "[0,0]") + "}", 0, "has no size"},
      {"{" + entry("a", "F32", "[0," + huge + "]", "[0,0]") + "}", 0, "has no size"},
      {"{" + entry("a", "F32", "[" + huge + ",0]", "[0,0]") + "}", 0, "has no size"},
      {"{" + a + "," + entry("b", "F32", "[1]", "[2,6]") + "}", 6, "\"b\" begins at byte 2 and overlaps"},
      {"{" + a + "," + entry("b", "F32", "[1]", "[0,4]") + "}", 4, "begins at byte 0 and overlaps"},
      {"{" + a + "," + entry("b", "F32", "[1]", "[8,12]") + "}", 12, "\"b\" begins at byte 8, after a hole behind"},
      {"{" + entry("b", "F32", "[1]", "[8,12]") + "}", 12, "begins at byte 8, after a hole behind what ends at 0"},
      {"{" + a + "}", 3, "truncated: the tensors have 4 bytes, the file has 3"},
      {"{" + a + "}", 5, "1 bytes behind the last tensor belong to none"},
  };
  for (const BadHeader& bad : cases) {
    const std::string error = error_of(bad.header, bad.data_bytes);
    EXPECT_NE(error.find(bad.says), std::string::npos) << bad.header << "\ngives: " << error;
    EXPECT_EQ(error.rfind("f: ", 0), 0u) << error;
  }
}

TEST(SafetensorsReader, RefusesLengths) {
  EXPECT_NE(error_of(std::vector<std::byte>{}).find("truncated: 0 bytes"), std::string::npos);
  EXPECT_NE(error_of(std::vector<std::byte>(7)).find("truncated: 7 bytes"), std::string::npos);
  EXPECT_NE(error_of(std::vector<std::byte>(8)).find("does not begin with {"), std::string::npos);
  auto file = file_of("{}", 0);
  file[0] = std::byte{3};
  EXPECT_NE(error_of(file).find("truncated: the header has 3 bytes, the file 10"), std::string::npos);
  file[3] = std::byte{6};  // 6 << 24 is more than 100 MB
  EXPECT_NE(error_of(file).find("its header would have 100663299 bytes"), std::string::npos);
  for (std::size_t i = 0; i < 8; ++i) file[i] = std::byte{0xff};
  EXPECT_NE(error_of(file).find("not a safetensors file"), std::string::npos);
}

TEST(SafetensorsReader, DeepJsonIsRefusedAtItsFirstLevelThatDoesNotBelong) {
  const std::string deep(1000000, '[');
  EXPECT_NE(error_of("{\"a\":" + deep, 0).find("an array where none belongs"), std::string::npos);
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  EXPECT_NE(error_of(objects, 0).find("tensor \"a\": the field \"a\" is unknown"), std::string::npos);
}

TEST(SafetensorsReader, EveryCutOfAFileIsRefused) {
  const auto file = file_of("{" + entry("a", "F32", "[2]", "[0,8]") + "}", 8);
  ASSERT_EQ(error_of(file), "");
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_NE(error_of({file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size)}), "") << size;
  }
}

TEST(SafetensorsReader, NamesInMessagesHaveNoControlCharacters) {
  const std::string error = error_of("{" + entry(R"(a\u001b[2J\n)", "F33", "[1]", "[0,4]") + "}", 4);
  EXPECT_EQ(error.find('\x1b'), std::string::npos);
  EXPECT_NE(error.find("a?[2J?"), std::string::npos) << error;
  EXPECT_EQ(printable(std::string(300, 'x')).size(), 203u);
  EXPECT_EQ(printable(std::string(199, 'x') + "\xc3\xa9"), std::string(199, 'x') + "...");
  // Terminal control characters: of ASCII, of Latin 1 (0x9b is ESC [), direction marks, and bytes that are not UTF-8.
  const std::pair<std::string, const char*> cases[] = {
      {"a\nb\x7f", "a?b?"},
      {std::string("\0", 1), "?"},
      {"\xc2\x9b", "?"},
      {"\xc2\xa0\xc3\xa9", "\xc2\xa0\xc3\xa9"},
      {"\xe2\x80\xae\xe2\x81\xa6\xe2\x80\xa8", "???"},
      {"\x9b", "?"},
      {"\xe2\x82\xac\xf0\x9f\x99\x82", "\xe2\x82\xac\xf0\x9f\x99\x82"},
      {"\xe2\x82", "??"},
      {"\xc0\x9b\xff", "???"},
      {"\xe2\x80\x8e\xe2\x80\x8f\xd8\x9c\xe2\x80\x8b\xe2\x81\xa0\xef\xbb\xbf\xc2\xad",
       "???????"},                                          // U+200E, U+200F, U+061C
      {"\xf3\xa0\x81\x81\xe2\x80\xa9\xef\xbf\xb9", "???"},  // a tag
      {"\xe0\x81\x81", "???"},                              // 'A' in three bytes
      {"\xed\xa0\x80", "???"},                              // half of a pair
      {"\xf4\x90\x80\x80", "????"},                         // beyond the last one
      {"\xcd\xb8\xe2\x80\x90", "\xcd\xb8\xe2\x80\x90"},
      {"\xc3(", "?("},
  };
  for (const auto& [text, shown] : cases) {
    EXPECT_EQ(printable(text), shown);
    EXPECT_STREQ(FileError(text).what(), std::string(shown).c_str());
  }
}

TEST(SafetensorsReader, RefusesPathsThatAreNoFile) {
  const Folder folder;
  EXPECT_THROW(SafetensorsFile::open(folder.path), FileError);
  EXPECT_THROW(SafetensorsFile::open(folder.path / "none"), FileError);
  std::ofstream(folder.path / "empty").close();
  EXPECT_THROW(SafetensorsFile::open(folder.path / "empty"), FileError);
}

TEST(Elements, ValuesAreWidenedWhereverTheyLie) {
  const std::vector<std::byte> bytes = {std::byte{0xee}, std::byte{0x00}, std::byte{0x3c}, std::byte{0x00},
                                        std::byte{0xc0}};
  std::vector<float> values(2);
  read_values(ElementType::f16, Bytes(bytes).subspan(1), values, "x");
  EXPECT_EQ(values, (std::vector<float>{1, -2}));
  read_values(ElementType::s16, Bytes(bytes).subspan(1), values, "x");
  EXPECT_EQ(values, (std::vector<float>{0x3c00, -0x4000}));
  read_values(ElementType::u16, Bytes(bytes).subspan(1), values, "x");
  EXPECT_EQ(values, (std::vector<float>{0x3c00, 0xc000}));
  EXPECT_THROW(read_values(ElementType::f16, bytes, values, "x"), FileError);
  values.resize(5);
  for (const ElementType type : {ElementType::f8_e4m3, ElementType::f8_e5m2, ElementType::f8_e8m0}) {
    EXPECT_THROW(read_values(type, bytes, values, "x"), FileError);
  }
  EXPECT_THROW(read_values(ElementType::s64, {}, {}, "x"), FileError);
}

TEST(Elements, WritingRoundsOnce) {
  const float values[] = {1 + 0x1p-11f + 0x1p-20f, -0.1f, 65520, 0x1p-140f, std::nanf("")};
  for (const ElementType type : {ElementType::f16, ElementType::bf16, ElementType::f32, ElementType::f64}) {
    std::vector<float> back(std::size(values)), rounded(std::begin(values), std::end(values));
    read_values(type, write_values(type, values), back, "x");
    round_values(type, rounded);
    for (std::size_t i = 0; i < back.size(); ++i)
      EXPECT_EQ(std::isnan(back[i]) ? 0 : back[i], std::isnan(rounded[i]) ? 0 : rounded[i]);
    EXPECT_TRUE(std::isnan(back.back()));
  }
  std::vector<float> half = {1 + 0x1p-11f + 0x1p-20f};
  round_values(ElementType::f16, half);
  EXPECT_EQ(half[0], 1 + 0x1p-10f);
  EXPECT_THROW(write_values(ElementType::s8, half), FileError);
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  const Folder folder;
  const auto path = folder.path / "a.safetensors";
  const std::vector<TensorSpec> specs = {{"z", ElementType::s8, {3}},
                                         {"b", ElementType::f32, {2}},
                                         {"a", ElementType::f32, {1}},
                                         {"none", ElementType::f64, {0, 4}}};
  const std::vector<std::byte> data(12, std::byte{7});
  const auto write = [&](const std::vector<TensorSpec>& order, bool overwrite) {
    SafetensorsWriter writer(path, order, {{"format", "pt"}});
    writer.append("z", Bytes(data).first(3));
    writer.append("b", Bytes(data).first(5));
    writer.append("a", Bytes(data).first(4));
    writer.append("b", Bytes(data).first(3));
    writer.finish(overwrite);
    EXPECT_EQ(writer.size(), std::filesystem::file_size(path));
  };
  write(specs, false);
  const std::string first = read_all(path);
  write({specs.rbegin(), specs.rend()}, true);
  EXPECT_EQ(read_all(path), first);  // the bytes do not depend on the order

  const SafetensorsFile read = SafetensorsFile::open(path);
  std::vector<std::string> names;
  for (const TensorInfo& tensor : read.tensors()) {
    names.push_back(tensor.name);
    const auto at = static_cast<std::size_t>(read.bytes(tensor).data() - read.bytes(read.tensors()[0]).data());
    EXPECT_EQ(at % static_cast<std::size_t>(bits(tensor.type) / 8), 0u);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"none", "a", "b", "z"}));
  EXPECT_EQ(read.bytes(*read.find("b"))[7], std::byte{7});
  EXPECT_EQ(files_in(folder.path), 1u);
  EXPECT_THROW(write(specs, false), FileError);  // it exists
  EXPECT_EQ(read_all(path), first);
  EXPECT_EQ(files_in(folder.path), 1u);
}

TEST(SafetensorsWriter, LeavesNothingUnfinished) {
  const Folder folder;
  const auto path = folder.path / "a";
  {
    SafetensorsWriter writer(path, {{"a", ElementType::f32, {2}}}, {});
    EXPECT_EQ(files_in(folder.path), 1u);  // the temporary file
    EXPECT_FALSE(std::filesystem::exists(path));
    const std::vector<std::byte> data(9);
    writer.append("a", Bytes(data).first(4));
    EXPECT_THROW(writer.append("b", data), FileError);
    EXPECT_THROW(writer.append("a", Bytes(data).first(5)), FileError);
    EXPECT_THROW(writer.finish(true), FileError);  // 4 bytes are missing
  }
  EXPECT_EQ(files_in(folder.path), 0u);
  EXPECT_THROW(SafetensorsWriter(path, {{"a", ElementType::f32, {2}}, {"a", ElementType::s8, {2}}}, {}), FileError);
  EXPECT_THROW(SafetensorsWriter(path, {{"__metadata__", ElementType::f32, {2}}}, {}), FileError);
  EXPECT_THROW(SafetensorsWriter(path, {{"a", ElementType::f32, {-1}}}, {}), FileError);
  EXPECT_THROW(SafetensorsWriter(folder.path / "none" / "a", {}, {}), FileError);
  EXPECT_THROW(SafetensorsWriter(path, {{"\xff", ElementType::f32, {2}}}, {}), FileError);  // not UTF-8
  EXPECT_THROW(SafetensorsWriter(path, {}, {{"a", "\xff"}}), FileError);
  EXPECT_EQ(files_in(folder.path), 0u);
}

// ---- Folders ----

TEST(Checkpoint, ReadsShardsByTheirIndex) {
  const Folder folder;
  write_file(folder.path / "1.safetensors", {{"a", {2}, {1, 2}}});
  write_file(folder.path / "2.safetensors", {{"b", {1}, {3}}});
  const auto write = [&](const std::string& index) { write_text(folder.path / "model.safetensors.index.json", index); };
  const auto error = [&] { return error_of_open(folder.path); };

  write(R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})");
  const Checkpoint model = Checkpoint::open(folder.path);
  EXPECT_EQ(model.values("b"), std::vector<float>{3});
  EXPECT_EQ(model.shard_of("b"), 1u);
  EXPECT_THROW(model.get("c"), FileError);
  EXPECT_THROW(model.words("b"), FileError);

  ASSERT_EQ(mkfifo((folder.path / "pipe").c_str(), 0600), 0);  // opening it would wait for a writer
  const std::pair<const char*, std::string> bad[] = {
      {R"({"weight_map":{"a":"1.safetensors","b":"1.safetensors"}})", "\"b\" is not in 1.safetensors"},
      {R"({"weight_map":{"a":"1.safetensors"}, "weight_map":{}})", "\"weight_map\" appears twice"},
      {R"({"weight_map":{"a":"2.safetensors","b":"2.safetensors"}})", "\"a\" is not in 2.safetensors"},
      {R"({"weight_map":{"a":"3.safetensors"}})", "cannot read"},
      {R"({"weight_map":{"a":"../1.safetensors"}})", "not the name of a file in this folder"},
      {R"({"weight_map":{"a":"/etc/passwd"}})", "not the name of a file in this folder"},
      {R"({"weight_map":{"a":""}})", "not the name of a file in this folder"},
      {R"({"weight_map":{"a":"\u001b[2J\u009b1m"}})", "cannot read " + folder.path.string() + "/?[2J?1m: No such file"},
      {R"({"weight_map":{"a":"/\u001b[2J"}})", "would be in \"/?[2J\""},
      {R"({"weight_map":{"a":"pipe"}})", "pipe: it is not a file"},
      {R"({"weight_map":{"a":1}})", "is not a string"},
      {R"({"weight_map":{}})", "is empty"},
      {R"({"weight_map":[]})", "no object \"weight_map\""},
      {"[]", "not a JSON object"},
      {"{", "not JSON"},
  };
  for (const auto& [index, says] : bad) {
    write(index);
    EXPECT_NE(error().find(says), std::string::npos) << index << "\ngives: " << error();
  }
  write(R"({"weight_map":{"a":"1.safetensors"}})");
  EXPECT_EQ(error(), "");  // 2.safetensors is not part of the model
  write_file(folder.path / "2.safetensors", {{"b", {1}, {3}}, {"c", {1}, {3}}});
  write(R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})");
  EXPECT_NE(error().find("lacks \"c\", which is in 2.safetensors"), std::string::npos) << error();
  write_file(folder.path / "2.safetensors", {{"b", {1}, {3}}, {"a", {1}, {3}}});
  EXPECT_NE(error().find("\"a\" is in 1.safetensors and in 2.safetensors"), std::string::npos) << error();
  write_file(folder.path / "model.safetensors", {{"a", {1}, {3}}});
  EXPECT_NE(error().find("has both"), std::string::npos) << error();
}

std::string repeated(const std::string& piece, int times) {
  std::string text;
  for (int i = 0; i < times; ++i) text += piece;
  return text;
}

TEST(Checkpoint, RefusesConfigs) {
  const Folder folder;
  EXPECT_NE(error_of_open(folder.path).find("has neither"), std::string::npos);
  write_file(folder.path / "model.safetensors", {{"a", {1}, {3}}});
  const std::string deep = "{\"a\":" + std::string(100000, '[');
  const std::pair<std::string, const char*> bad[] = {
      {"{", "not JSON"},
      {"1", "not a JSON object"},
      {"[1]", "not a JSON object"},
      {"{\"a\":[" + std::string(2'000'000, ' ') + repeated("0,", 1'000'000) + "0]}", "more than 1000000 values"},
      {"{\"a\":{" + repeated("\"b\":{},", 1000) + "\"c\":0}}", "\"b\" appears twice"},
      {repeated("{\"a\":", 65) + "0" + repeated("}", 65), "deeper than 64 levels"},
      {R"({"quantization_config":{"quant_method":"gptq","checkpoint_format":"gptq_v3"}})",
       "checkpoint_format is \"gptq_v3\", expected one of gptq, gptq_v2"},
      {R"({"quantization_config":{"quant_method":"gptq","checkpoint_format":"marlin"}})", "expected one of "},
      {R"({"quantization_config":{"quant_method":"awq","version":"gemv"}})", "expected one of gemm, GEMM"},
      {R"({"quantization_config":{"quant_method":"compressed-tensors","format":"marlin-24"}})", "expected one of "},
      {R"({"quantization_config":{"quant_method":"compressed-tensors"}})", "has no config_groups"},
      {R"({"quantization_config":{"quant_method":"compressed-tensors","config_groups":{"g":{"weights":[]}}}})",
       "g: \"weights\" is not an object"},
      {std::string("{}\0x", 4), "not JSON (byte 3 is 0)"},
      {deep, "deeper than"},
      {R"({"a":-NaN})", "not JSON (byte 7)"},
      {R"({"a":1NaN})", "not JSON (byte 7)"},
      {R"({"a":Infinity1})", "not JSON (byte 6)"},
      {R"({NaN:1})", "not JSON (byte 2)"},
      {R"({"quantization_config":{"quant_method":"gptq","bits":NaN}})", "\"bits\" is not an integer"},
      {R"({"model_type":1})", "\"model_type\" is not a string"},
      {R"({"quantization_config":1})", "\"quantization_config\" is not an object"},
      {R"({"quantization_config":{}})", "has no \"quant_method\""},
      {R"({"a":1,"a":2})", "\"a\" appears twice"},
      {std::string(16'000'001, ' '), "more than 16000000 bytes of JSON"},
      {R"({"a":1e999})", "JSON that is not read"},  // beyond every double
      {R"({"do_layer_norm_before":0})", "\"do_layer_norm_before\" is neither true nor false"},
      {R"({"quantization_config":{"quant_method":"gptq","bits":"4"}})", "\"bits\" is not an integer"},
      {R"({"quantization_config":{"quant_method":"gptq","bits":4.5}})", "\"bits\" is not an integer"},
      {R"({"quantization_config":{"quant_method":["gptq"]}})", "\"quant_method\" is not a string"},
  };
  for (const auto& [config, says] : bad) {
    write_text(folder.path / "config.json", config);
    EXPECT_NE(error_of_open(folder.path).find(says), std::string::npos) << error_of_open(folder.path);
  }
  write_text(folder.path / "config.json", repeated("{\"a\":", 64) + "0" + repeated("}", 64));
  EXPECT_EQ(error_of_open(folder.path), "");
  write_text(folder.path / "config.json",
             R"({"model_type":"opt","do_layer_norm_before":false,)"
             R"("quantization_config":{"quant_method":"gptq","checkpoint_format":"gptq_v2","bits":4}})");
  const ModelConfig config = Checkpoint::open(folder.path).config();
  EXPECT_EQ(config.model_type, "opt");
  EXPECT_FALSE(config.norm_before);
  EXPECT_EQ(config.method, "gptq");
  EXPECT_EQ(config.format, "gptq_v2");
  EXPECT_EQ(config.bits, 4);
  const auto file = folder.path / "config.json";
  std::filesystem::remove(file);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  EXPECT_NE(error_of_open(folder.path).find("config.json: it is not a file"), std::string::npos);
  std::filesystem::remove(file);
  std::filesystem::create_symlink("none", file);
  EXPECT_NE(error_of_open(folder.path).find("config.json: No such file"), std::string::npos);
}

}  // namespace
}  // namespace octile::checkpoint
