#include "server/log_line.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RAW  1024 /* of one value before it is escaped */
#define MAX_SPEC 64
#define TAIL     24 /* room kept for `,"cut":true}` and the newline */
/* Readers keep numbers as doubles: beyond this they would lose digits, so it is written as text. */
#define MAX_NUMBER (INT64_C(1) << 53)

const char *const srv_log_level_names[] = {"error", "warn", "info", "debug", "trace"};

/* Text with a limit. What does not fit whole is not written at all. */
struct text {
    char *bytes;
    size_t n, size;
    bool is_cut;
};

/* va_list by address, as a parameter of that type would be a copy. */
struct arguments {
    va_list list;
};

static bool put(struct text *text, const char *bytes, size_t n)
{
    if (text->is_cut || n > text->size - text->n) {
        text->is_cut = true;
        return false;
    }
    memcpy(text->bytes + text->n, bytes, n);
    text->n += n;
    return true;
}

static bool put_word(struct text *text, const char *word)
{
    return put(text, word, strlen(word));
}

/* ---- escaping ------------------------------------------------------------------------------------ */

/* The character at bytes[0..n), n > 0, and how many bytes it has; 0xFFFD and 1 for what is no UTF-8. */
static uint32_t decode(const unsigned char *bytes, size_t n, size_t *n_p)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t length = bytes[0] < 0x80             ? 1
                    : (bytes[0] & 0xe0) == 0xc0 ? 2
                    : (bytes[0] & 0xf0) == 0xe0 ? 3
                    : (bytes[0] & 0xf8) == 0xf0 ? 4
                                                : 0;
    uint32_t c = length == 1 ? bytes[0] : bytes[0] & (0x7fu >> length);

    *n_p = 1;
    if (length == 0 || length > n)
        return 0xfffd;
    for (size_t i = 1; i < length; i++) {
        if ((bytes[i] & 0xc0) != 0x80)
            return 0xfffd;
        c = c << 6 | (bytes[i] & 0x3f);
    }
    if ((length > 1 && c < least[length]) || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff))
        return 0xfffd;
    *n_p = length;
    return c;
}

/* What a terminal or a reader would act on instead of showing it. */
static bool is_active(uint32_t c)
{
    return c < 0x20 || (c >= 0x7f && c <= 0x9f) || c == 0x2028 || c == 0x2029 || (c >= 0x202a && c <= 0x202e)
           || (c >= 0x2066 && c <= 0x2069) || c == 0x200e || c == 0x200f || c == 0xfffd || c == 0xfeff;
}

/* The inside of a string, at most SRV_LOG_MAX_VALUE bytes. */
static void put_escaped(struct text *text, const char *raw, size_t n)
{
    const unsigned char *bytes = (const unsigned char *)raw;
    size_t end = text->n + SRV_LOG_MAX_VALUE - 3, n_char;

    for (size_t i = 0; i < n; i += n_char) {
        uint32_t c = decode(bytes + i, n - i, &n_char);
        char escape[8];

        if (c == '"' || c == '\\')
            snprintf(escape, sizeof(escape), "\\%c", (char)c);
        else if (is_active(c))
            snprintf(escape, sizeof(escape), "\\u%04x", (unsigned)c);
        else
            memcpy(escape, raw + i, n_char), escape[n_char] = '\0';
        if (text->n + strlen(escape) > end) {
            put_word(text, "...");
            return;
        }
        put_word(text, escape);
    }
}

static void put_string(struct text *text, const char *raw, size_t n)
{
    put_word(text, "\"");
    put_escaped(text, raw, n);
    put_word(text, "\"");
}

/* ---- formats ------------------------------------------------------------------------------------- */

/* How many bytes of format are a key, '=' excluded; 0: no key begins here. */
static size_t key_length(const char *format)
{
    size_t n = 0;

    while ((format[n] >= 'a' && format[n] <= 'z') || format[n] == '_'
           || (n > 0 && format[n] >= '0' && format[n] <= '9'))
        n++;
    return format[n] == '=' ? n : 0;
}

/* The sentence's end, blanks excluded. */
static size_t sentence_length(const char *format)
{
    size_t n = 0;

    for (size_t i = 0; format[i] != '\0'; i++) {
        if ((i == 0 || format[i - 1] == ' ') && key_length(format + i) > 0)
            return n;
        if (format[i] != ' ')
            n = i + 1;
    }
    return n;
}

/* One conversion of a format. */
struct conversion {
    char spec[MAX_SPEC]; /* flags, width and precision, "%" first */
    char length[3];
    char type;
};

static const char *take_number(struct conversion *conversion, const char *at, struct arguments *args)
{
    size_t n = strlen(conversion->spec);

    if (*at == '*') {
        snprintf(conversion->spec + n, MAX_SPEC - n, "%d", va_arg(args->list, int));
        return at + 1;
    }
    for (; *at >= '0' && *at <= '9' && n < MAX_SPEC - 1; at++)
        conversion->spec[n++] = *at;
    return at;
}

/* at: behind the '%'. Returns where the conversion ends. */
static const char *take_conversion(struct conversion *conversion, const char *at, struct arguments *args)
{
    size_t n = 1;

    memset(conversion, 0, sizeof(*conversion));
    conversion->spec[0] = '%';
    while (*at != '\0' && strchr("-+ #0", *at) && n < 8)
        conversion->spec[n++] = *at++;
    at = take_number(conversion, at, args);
    if (*at == '.') {
        conversion->spec[strlen(conversion->spec)] = '.';
        at = take_number(conversion, at + 1, args);
    }
    for (n = 0; n < 2 && *at != '\0' && strchr("hljztL", *at); n++)
        conversion->length[n] = *at++;
    conversion->type = *at;
    return *at == '\0' ? at : at + 1;
}

static intmax_t take_signed(const char *length, struct arguments *args)
{
    if (strcmp(length, "l") == 0)
        return va_arg(args->list, long);
    if (strcmp(length, "ll") == 0)
        return va_arg(args->list, long long);
    if (strcmp(length, "j") == 0)
        return va_arg(args->list, intmax_t);
    if (strcmp(length, "z") == 0 || strcmp(length, "t") == 0)
        return va_arg(args->list, ptrdiff_t);
    return va_arg(args->list, int);
}

static uintmax_t take_unsigned(const char *length, struct arguments *args)
{
    if (strcmp(length, "l") == 0)
        return va_arg(args->list, unsigned long);
    if (strcmp(length, "ll") == 0)
        return va_arg(args->list, unsigned long long);
    if (strcmp(length, "j") == 0)
        return va_arg(args->list, uintmax_t);
    if (strcmp(length, "z") == 0 || strcmp(length, "t") == 0)
        return va_arg(args->list, size_t);
    if (strcmp(length, "hh") == 0)
        return (unsigned char)va_arg(args->list, unsigned);
    if (strcmp(length, "h") == 0)
        return (unsigned short)va_arg(args->list, unsigned);
    return va_arg(args->list, unsigned);
}

/* Prints one argument, taken by its type. False: a %s that is NULL. */
static bool print_argument(struct conversion *conversion, struct arguments *args, char *out, size_t size)
{
    char *end = conversion->spec + strlen(conversion->spec);
    const char *string;

    out[0] = '\0';
    switch (conversion->type) {
    case 'd':
    case 'i':
        memcpy(end, PRIdMAX, sizeof(PRIdMAX));
        snprintf(out, size, conversion->spec, take_signed(conversion->length, args));
        return true;
    case 'u':
    case 'o':
    case 'x':
    case 'X':
        *end = 'j', end[1] = conversion->type;
        snprintf(out, size, conversion->spec, take_unsigned(conversion->length, args));
        return true;
    case 'e':
    case 'f':
    case 'g':
    case 'a':
        if (conversion->length[0] == 'L')
            *end++ = 'L';
        *end = conversion->type;
        if (conversion->length[0] == 'L')
            snprintf(out, size, conversion->spec, va_arg(args->list, long double));
        else
            snprintf(out, size, conversion->spec, va_arg(args->list, double));
        return true;
    case 'c':
        snprintf(out, size, "%c", va_arg(args->list, int));
        return true;
    case 'p':
        snprintf(out, size, "%p", va_arg(args->list, void *));
        return true;
    case 's':
        *end = 's';
        string = va_arg(args->list, const char *);
        snprintf(out, size, conversion->spec, string ? string : "");
        return string != NULL;
    default: /* the compiler checks formats: this is "%%" */
        snprintf(out, size, "%%");
        return true;
    }
}

/* What a piece of a format prints. */
struct printed {
    char raw[MAX_RAW];
    size_t n;
    bool is_number; /* one conversion of a number and nothing else */
    bool is_absent; /* a %s was NULL */
};

/* is_sentence: what arguments print there must not look like a field. */
static void print_piece(struct printed *printed, const char *format, size_t n, struct arguments *args,
                        bool is_sentence)
{
    const char *at = format, *end = format + n;
    struct conversion conversion;

    printed->n = 0;
    printed->is_number = printed->is_absent = false;
    while (at < end) {
        char *out = printed->raw + printed->n;
        size_t room = sizeof(printed->raw) - printed->n;

        if (*at != '%') {
            snprintf(out, room, "%c", *at++);
        } else {
            bool is_first = at == format;

            at = take_conversion(&conversion, at + 1, args);
            if (!print_argument(&conversion, args, out, room))
                printed->is_absent = true;
            printed->is_number = is_first && at == end && strchr("diuefg", conversion.type) != NULL;
            for (size_t i = 0; is_sentence && out[i] != '\0'; i++)
                if (out[i] == '=' || out[i] == '"' || out[i] == '\\' || (unsigned char)out[i] < 0x20)
                    out[i] = '?';
        }
        printed->n += strlen(out);
    }
}

/* ---- values --------------------------------------------------------------------------------------- */

/* As JSON's grammar has it: printf can also make 007, +1, inf and nan. */
static bool is_json_number(const char *text)
{
    const char *at = text + (text[0] == '-');
    char *end;

    if (*at < '0' || *at > '9' || (at[0] == '0' && at[1] >= '0' && at[1] <= '9'))
        return false;
    strtod(at, &end);
    return *end == '\0' && end[-1] != '.' && !strpbrk(at, "xX");
}

static bool is_exact(const char *text)
{
    double value = strtod(text, NULL);

    if (strpbrk(text, ".e"))
        return true;
    return value <= (double)MAX_NUMBER && value >= -(double)MAX_NUMBER;
}

/* A word that needs no quotes in text. */
static bool is_plain(const struct printed *printed)
{
    for (size_t i = 0; i < printed->n; i++)
        if (printed->raw[i] <= 0x20 || printed->raw[i] >= 0x7f || strchr("\"\\=", printed->raw[i]))
            return false;
    return printed->n > 0;
}

static void put_value(struct text *text, const struct srv_log_event *event, const struct printed *printed,
                      bool is_quoted)
{
    bool is_bare;

    if (event->as == SRV_LOG_JSON)
        is_bare = printed->is_number && is_json_number(printed->raw) && is_exact(printed->raw);
    else
        is_bare = !is_quoted && printed->n < SRV_LOG_MAX_VALUE && is_plain(printed);
    if (is_bare)
        put(text, printed->raw, printed->n);
    else
        put_string(text, printed->raw, printed->n);
}

/* Writes the field that begins at format, and returns where the next one may. */
static const char *put_field(struct text *line, const struct srv_log_event *event, const char *format,
                             struct arguments *args)
{
    char bytes[SRV_LOG_MAX_VALUE * 2];
    struct text field = {bytes, 0, sizeof(bytes), false};
    size_t n_key = key_length(format);
    const char *value = format + n_key + 1, *end;
    bool is_quoted = *value == '"', is_json = event->as == SRV_LOG_JSON;
    struct printed printed;

    value += is_quoted;
    end = value + strcspn(value, is_quoted ? "\"" : " ");
    print_piece(&printed, value, (size_t)(end - value), args, false);
    put_word(&field, is_json ? ",\"" : " ");
    put(&field, format, n_key);
    put_word(&field, is_json ? "\":" : "=");
    put_value(&field, event, &printed, is_quoted);
    if (!printed.is_absent)
        put(line, bytes, field.n);
    return end + (is_quoted && *end == '"');
}

/* ---- the line -------------------------------------------------------------------------------------- */

static void put_head(struct text *line, const struct srv_log_event *event, const struct printed *sentence)
{
    char head[192], ts[128];
    struct tm tm;

    gmtime_r(&event->now.tv_sec, &tm);
    snprintf(ts, sizeof(ts), "%04d-%02d-%02dT%02d:%02d:%02d.%06ldZ", tm.tm_year + 1900, tm.tm_mon + 1,
             tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, event->now.tv_nsec / 1000);
    if (event->as == SRV_LOG_JSON) {
        snprintf(head, sizeof(head), "{\"ts\":\"%s\",\"level\":\"%s\",\"msg\":", ts,
                 srv_log_level_names[event->level]);
        put_word(line, head);
        put_string(line, sentence->raw, sentence->n);
    } else {
        snprintf(head, sizeof(head), "%s %-5s ", ts, srv_log_level_names[event->level]);
        put_word(line, head);
        put_escaped(line, sentence->raw, sentence->n);
    }
}

size_t srv_log_line_write(char *line, const struct srv_log_event *event, va_list args)
{
    struct text text = {line, 0, SRV_LOG_MAX_LINE - TAIL, false};
    bool is_json = event->as == SRV_LOG_JSON;
    size_t n_sentence = sentence_length(event->format);
    const char *at = event->format + n_sentence;
    struct arguments arguments;
    struct printed sentence;

    va_copy(arguments.list, args);
    print_piece(&sentence, event->format, n_sentence, &arguments, true);
    put_head(&text, event, &sentence);
    while (*(at += strspn(at, " ")) != '\0') {
        if (key_length(at) > 0) {
            at = put_field(&text, event, at, &arguments);
        } else { /* no field, but what it prints is taken off the arguments */
            print_piece(&sentence, at, strcspn(at, " "), &arguments, false);
            at += strcspn(at, " ");
        }
    }
    va_end(arguments.list);
    text.size = SRV_LOG_MAX_LINE;
    if (text.is_cut) {
        text.is_cut = false;
        put_word(&text, is_json ? ",\"cut\":true" : " cut=true");
    }
    put_word(&text, is_json ? "}\n" : "\n");
    return text.n;
}

void srv_log_line_sentence(const char *format, char *text, size_t size)
{
    size_t n_sentence = sentence_length(format), n = 0;

    for (size_t i = 0; i < n_sentence && n + 4 < size; i++) {
        if (format[i] != '%') {
            text[n++] = format[i];
            continue;
        }
        while (i + 1 < n_sentence && !strchr("diuoxXefgacps%", format[i + 1]))
            i++;
        i++;
        memcpy(text + n, "...", 3);
        n += 3;
    }
    text[n] = '\0';
}
