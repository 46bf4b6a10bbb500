package main

import (
	"crypto"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"maps"
	"strings"
	"time"
)

// openID returns tokens of an issuer, valid and invalid.
func (a *axis) openID(issuer, audience string) map[string]*token {
	now := time.Now()
	base := fields{
		"iss": issuer, "aud": audience, "sub": "subject", "email": "jane@example.com", "email_verified": true,
		"groups": []string{"dev", "ops"}, "team": "a", "iat": now.Unix(), "exp": now.Add(time.Hour).Unix(),
	}
	all := map[string]*token{}
	add := func(name string, header, change fields, key any, bend func(string) string) {
		j := &token{
			header: fields{"alg": "RS256", "kid": "rsa", "typ": "JWT"},
			claims: maps.Clone(base),
			key:    key,
			bend:   bend,
		}
		if key == nil {
			j.key = a.keys["rsa"]
		}
		for k, v := range header {
			if j.header[k] = v; v == nil {
				delete(j.header, k)
			}
		}
		for k, v := range change {
			if j.claims[k] = v; v == nil {
				delete(j.claims, k)
			}
		}
		all[name] = j
	}
	claims := func(name string, change fields) { add(name, nil, change, nil, nil) }
	add("valid", nil, nil, nil, nil)
	claims("expired", fields{"exp": now.Add(-time.Minute).Unix()})
	claims("long expired", fields{"exp": 1})
	claims("no expiry", fields{"exp": nil})
	claims("expiry is text", fields{"exp": "tomorrow"})
	claims("expiry is a fraction", fields{"exp": float64(now.Add(time.Hour).Unix()) + 0.5})
	claims("expiry is far", fields{"exp": int64(1) << 53})
	claims("expiry is negative", fields{"exp": -1})
	claims("not yet", fields{"nbf": now.Add(time.Hour).Unix()})
	claims("issued later", fields{"iat": now.Add(time.Hour).Unix()})
	claims("wrong audience", fields{"aud": "somebody"})
	claims("many audiences", fields{"aud": []string{"x", audience}})
	claims("no audience", fields{"aud": nil})
	claims("empty audiences", fields{"aud": []string{}})
	claims("odd audience", fields{"aud": fields{"a": 1}})
	claims("audience in another case", fields{"aud": strings.ToUpper(audience)})
	claims("wrong issuer", fields{"iss": issuer + "/"})
	claims("unknown issuer", fields{"iss": "https://issuer.example.com"})
	claims("no issuer", fields{"iss": nil})
	claims("odd issuer", fields{"iss": []string{issuer}})
	claims("accounts' issuer", fields{"iss": accountIssuer})
	claims("legacy accounts' issuer", fields{"iss": "kubernetes/serviceaccount"})
	claims("no mail", fields{"email": nil})
	claims("mail not verified", fields{"email_verified": false})
	claims("mail verified is text", fields{"email_verified": "true"})
	claims("no verification", fields{"email_verified": nil})
	claims("mail is a list", fields{"email": []string{"a"}})
	claims("empty mail", fields{"email": ""})
	claims("system mail", fields{"email": "system:admin"})
	claims("one group", fields{"groups": "only"})
	claims("no groups", fields{"groups": nil})
	claims("groups are numbers", fields{"groups": []int{1}})
	claims("masters", fields{"groups": []string{"system:masters"}})
	claims("empty group", fields{"groups": []string{""}})
	claims("many groups", fields{"groups": strings.Split(strings.Repeat("g,", 500)+"g", ",")})
	claims("wrong team", fields{"team": "b"})
	claims("no team", fields{"team": nil})
	claims("team is a list", fields{"team": []string{"a"}})
	claims("distributed groups", fields{"groups": nil, "_claim_names": fields{"groups": "src"},
		"_claim_sources": fields{"src": fields{"endpoint": "https://127.0.0.1:1/groups"}}})
	add(
		"no algorithm",
		fields{"alg": "none"},
		nil,
		[]byte{},
		func(s string) string { return s[:strings.LastIndex(s, ".")+1] },
	)
	add("no algorithm, in odd case", fields{"alg": "nOnE"}, nil, []byte{}, nil)
	add("algorithm missing", fields{"alg": nil}, nil, nil, nil)
	add("algorithm is a number", fields{"alg": 1}, nil, nil, nil)
	add("HMAC by the public key", fields{"alg": "HS256"}, nil, publicPEM(a.keys["rsa"]), nil)
	add("HMAC by nothing", fields{"alg": "HS256"}, nil, []byte{}, nil)
	add("PS256", fields{"alg": "PS256"}, nil, nil, nil)
	add("RS384", fields{"alg": "RS384"}, nil, nil, nil)
	add("RS512", fields{"alg": "RS512"}, nil, nil, nil)
	add("ES256", fields{"alg": "ES256", "kid": "ec"}, nil, a.keys["ec"], nil)
	add("ES384", fields{"alg": "ES384", "kid": "ec384"}, nil, a.keys["ec384"], nil)
	add("ES256 of another curve", fields{"alg": "ES256", "kid": "ec384"}, nil, a.keys["ec384"], nil)
	add("ES256 by the RSA key's name", fields{"alg": "ES256"}, nil, a.keys["ec"], nil)
	add("RS256 by the EC key's name", fields{"kid": "ec"}, nil, nil, nil)
	add("no key name", fields{"kid": nil}, nil, nil, nil)
	add("unknown key name", fields{"kid": "gone"}, nil, nil, nil)
	add("key name is a path", fields{"kid": "../../../dev/null"}, nil, nil, nil)
	add("key name is a number", fields{"kid": 7}, nil, nil, nil)
	add("another's key", nil, nil, newRSA(a.t), nil)
	add("own key in the header", fields{"jwk": jwk("own", newRSA(a.t))}, nil, newRSA(a.t), nil)
	add("key elsewhere", fields{"jku": "https://127.0.0.1:1/keys"}, nil, nil, nil)
	add("critical", fields{"crit": []string{"b64"}, "b64": false}, nil, nil, nil)
	add("compressed", fields{"zip": "DEF"}, nil, nil, nil)
	add("type is another", fields{"typ": "at+jwt"}, nil, nil, nil)
	add("claims are huge", nil, fields{"x": strings.Repeat("x", 30000)}, nil, nil)
	add(
		"claims are deep",
		nil,
		fields{"x": json.RawMessage(strings.Repeat("[", 200) + strings.Repeat("]", 200))},
		nil,
		nil,
	)
	add("padded", nil, nil, nil, func(s string) string { return s + "=" })
	add("a part more", nil, nil, nil, func(s string) string { return s + ".x" })
	add("a part less", nil, nil, nil, func(s string) string { return s[:strings.LastIndex(s, ".")] })
	add("signature cut", nil, nil, nil, func(s string) string { return s[:len(s)-10] })
	add("signature bent", nil, nil, nil, bent)
	add("claims bent", nil, nil, nil, func(s string) string {
		parts := strings.Split(s, ".")
		return parts[0] + "." + encoded(
			fields{"iss": issuer, "aud": audience, "exp": 1 << 40, "email": "root"},
		) + "." + parts[2]
	})
	add("claims are not JSON", nil, nil, nil, func(s string) string {
		parts := strings.Split(s, ".")
		return parts[0] + "." + encoded([]byte("{")) + "." + parts[2]
	})
	add("standard base64", nil, nil, nil, func(s string) string { return strings.ReplaceAll(s, "-", "+") + "+/" })
	return all
}

// bent returns a JWT with a different signature of the same length.
func bent(s string) string {
	i := strings.LastIndex(s, ".") + 10
	c := "A"
	if s[i] == 'A' {
		c = "B"
	}
	return s[:i] + c + s[i+1:]
}

func publicPEM(key any) []byte {
	der, err := x509.MarshalPKIXPublicKey(key.(crypto.Signer).Public())
	if err != nil {
		return nil
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}
