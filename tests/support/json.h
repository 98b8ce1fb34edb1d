// A JSON reader, just enough for the texts that unjam writes.
#pragma once

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace unjam_test {

struct Json {
  enum Type { kNull, kBool, kNumber, kString, kArray, kObject };
  Type type = kNull;
  bool boolean = false;
  double number = 0;
  std::string string;
  std::vector<Json> array;
  std::map<std::string, Json> object;

  bool has(const std::string& name) const { return object.count(name) != 0; }
  const Json& operator[](const std::string& name) const {
    const auto found = object.find(name);
    if (found == object.end()) throw std::runtime_error("JSON: no member \"" + name + "\"");
    return found->second;
  }
  const Json& operator[](std::size_t i) const { return array.at(i); }
  std::size_t size() const { return type == kArray ? array.size() : object.size(); }
  int integer() const {
    if (type != kNumber) throw std::runtime_error("JSON: a number was expected");
    return static_cast<int>(number);
  }
};

class JsonReader {
 public:
  // Throws std::runtime_error on anything that is not one JSON value.
  static Json parse(std::string_view text) {
    JsonReader r(text);
    Json v = r.value();
    r.space();
    if (r.at_ != text.size()) r.bad("something after the value");
    return v;
  }

 private:
  explicit JsonReader(std::string_view text) : text_(text) {}

  [[noreturn]] void bad(const char* what) const {
    const std::size_t from = at_ < 40 ? 0 : at_ - 40;
    throw std::runtime_error("JSON: " + std::string(what) + " at byte " + std::to_string(at_) +
                             ", near: " + std::string(text_.substr(from, 80)));
  }
  void space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != text_.npos) ++at_;
  }
  char peek() const {
    if (at_ >= text_.size()) bad("it ends early");
    return text_[at_];
  }
  void expect(char c) {
    if (peek() != c) bad("an unexpected character");
    ++at_;
  }
  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json value() {
    space();
    Json v;
    switch (peek()) {
      case '{':
        v.type = Json::kObject;
        ++at_;
        space();
        if (take("}")) return v;
        do {
          space();
          const std::string name = quoted();
          space();
          expect(':');
          if (!v.object.emplace(name, value()).second) bad("a name stands twice");
          space();
        } while (take(","));
        expect('}');
        return v;
      case '[':
        v.type = Json::kArray;
        ++at_;
        space();
        if (take("]")) return v;
        do {
          v.array.push_back(value());
          space();
        } while (take(","));
        expect(']');
        return v;
      case '"':
        v.type = Json::kString;
        v.string = quoted();
        return v;
      default:
        break;
    }
    if (take("null")) return v;
    if (take("true") || take("false")) {
      v.type = Json::kBool;
      v.boolean = text_[at_ - 2] == 'u';
      return v;
    }
    const std::string rest(text_.substr(at_, 40));
    char* end = nullptr;
    v.type = Json::kNumber;
    v.number = std::strtod(rest.c_str(), &end);
    if (end == rest.c_str() || !(rest[0] == '-' || (rest[0] >= '0' && rest[0] <= '9'))) {
      bad("no value");
    }
    at_ += static_cast<std::size_t>(end - rest.c_str());
    return v;
  }

  std::string quoted() {
    expect('"');
    std::string s;
    while (peek() != '"') {
      char c = text_[at_++];
      if (static_cast<unsigned char>(c) < 0x20) bad("a control character in a string");
      if (c == '\\') {
        c = peek();
        ++at_;
        switch (c) {
          case 'n':
            c = '\n';
            break;
          case 't':
            c = '\t';
            break;
          case 'r':
            c = '\r';
            break;
          case 'b':
            c = '\b';
            break;
          case 'f':
            c = '\f';
            break;
          case 'u': {
            const std::string hex(text_.substr(at_, 4));
            if (hex.size() != 4) bad("a short \\u");
            const long code = std::strtol(hex.c_str(), nullptr, 16);
            c = code < 0x80 ? static_cast<char>(code) : '?';
            at_ += 4;
            break;
          }
          case '"':
          case '\\':
          case '/':
            break;
          default:
            bad("an unknown escape");
        }
      }
      s += c;
    }
    ++at_;
    return s;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace unjam_test
