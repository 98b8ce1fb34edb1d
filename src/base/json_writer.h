// Writes JSON texts: enough for reports, no reading.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace unjam {

class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }

  JsonWriter& key(std::string_view name) {
    comma();
    quote(name);
    text_ += ':';
    after_key_ = true;
    return *this;
  }
  JsonWriter& value(std::string_view v) {
    comma();
    quote(v);
    return *this;
  }
  JsonWriter& value(const char* v) { return value(std::string_view(v)); }
  JsonWriter& value(bool v) { return raw(v ? "true" : "false"); }
  JsonWriter& value(int v) { return raw(std::to_string(v)); }
  JsonWriter& value(unsigned v) { return raw(std::to_string(v)); }
  JsonWriter& value(std::int64_t v) { return raw(std::to_string(v)); }
  JsonWriter& value(std::uint64_t v) { return raw(std::to_string(v)); }
  JsonWriter& value(double v) {
    char buffer[32];
    std::snprintf(buffer, sizeof(buffer), "%.6g", v);
    return raw(buffer);
  }
  // A value that is JSON already.
  JsonWriter& json(std::string_view text) { return raw(text); }
  JsonWriter& null() { return raw("null"); }
  template <class T>
  JsonWriter& field(std::string_view name, const T& v) {
    key(name);
    return value(v);
  }

  const std::string& text() const { return text_; }

 private:
  JsonWriter& open(char c) {
    comma();
    text_ += c;
    return *this;
  }
  JsonWriter& close(char c) {
    text_ += c;
    after_key_ = false;
    return *this;
  }
  JsonWriter& raw(std::string_view v) {
    comma();
    text_ += v;
    return *this;
  }
  void comma() {
    if (after_key_) {
      after_key_ = false;
    } else if (!text_.empty() && text_.back() != '{' && text_.back() != '[') {
      text_ += ',';
    }
  }
  void quote(std::string_view s) {
    text_ += '"';
    for (const char c : s) {
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char buffer[8];
        std::snprintf(buffer, sizeof(buffer), "\\u%04x", static_cast<unsigned>(c));
        text_ += buffer;
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_;
  bool after_key_ = false;
};

}  // namespace unjam
