# cmake -DINPUT=file -DOUTPUT=file.c -DSYMBOL=name -P Embed.cmake: the file's bytes as a C array.
file(READ ${INPUT} hex HEX)
string(LENGTH "${hex}" n)
math(EXPR n_bytes "${n} / 2")
string(REGEX REPLACE "(................................)" "\\1\n" hex "${hex}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${OUTPUT} "#include <stddef.h>\n\nextern const unsigned char ${SYMBOL}[];\nextern const size_t ${SYMBOL}_size;\n\nconst unsigned char ${SYMBOL}[] = {\n${bytes}\n};\nconst size_t ${SYMBOL}_size = ${n_bytes};\n")
