package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"os"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/util/keyutil"
)

// certificate is a client certificate. A client with an empty chain presents none.
type certificate struct {
	name  string
	chain []tls.Certificate
}

// authority signs certificates.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  crypto.Signer
}

// authorityOf reads an authority from path.crt and path.key.
func authorityOf(t testing.TB, path string) *authority {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(path+".crt", path+".key")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	return &authority{t, cert, pair.PrivateKey.(crypto.Signer)}
}

// newAuthority creates an authority that no server trusts.
func newAuthority(t testing.TB, name string) *authority {
	t.Helper()
	key := newKey(t, elliptic.P256())
	self := template(pkix.Name{CommonName: name})
	self.IsCA, self.ExtKeyUsage, self.KeyUsage = true, nil, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, self, self, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{t, cert, key}
}

// template returns the template of a client certificate that is valid now.
func template(subject pkix.Name) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<62))
	return &x509.Certificate{
		SerialNumber:          serial,
		Subject:               subject,
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(time.Hour),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
}

// sign creates a certificate with a new key. The client presents between as intermediates.
func (a *authority) sign(name string, c *x509.Certificate, between ...*authority) *certificate {
	a.t.Helper()
	key := newKey(a.t, elliptic.P256())
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	chain := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	for _, b := range between {
		chain.Certificate = append(chain.Certificate, b.cert.Raw)
	}
	return &certificate{name, []tls.Certificate{chain}}
}

// below returns an intermediate authority that this authority signed.
func (a *authority) below(name string) *authority {
	a.t.Helper()
	b := newAuthority(a.t, name)
	b.cert.Issuer = a.cert.Subject
	c := template(pkix.Name{CommonName: name})
	c.IsCA, c.ExtKeyUsage, c.KeyUsage = true, nil, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, b.key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	if b.cert, err = x509.ParseCertificate(der); err != nil {
		a.t.Fatal(err)
	}
	return b
}

// file writes the authority's certificate and returns the path.
func (a *authority) file(path string) string {
	a.t.Helper()
	if err := os.WriteFile(path, a.pem(), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// serving returns a serving certificate for loopback.
func (a *authority) serving() tls.Certificate {
	c := template(pkix.Name{CommonName: "loopback"})
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	c.IPAddresses = loopback
	return a.sign("serving", c).chain[0]
}

func newKey(t testing.TB, c elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(c, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func newRSA(t testing.TB) *rsa.PrivateKey {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func keyFile(t testing.TB, path string) crypto.Signer {
	t.Helper()
	key, err := keyutil.PrivateKeyFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return key.(crypto.Signer)
}

// fields is a JSON object.
type fields = map[string]any

// token is a JWT, valid or malformed.
type token struct {
	header, claims fields
	// key signs with the algorithm of the header, unless alg is set.
	key any
	alg string
	// bend changes the encoded token. It may be nil.
	bend func(string) string
}

func encoded(v any) string {
	text, ok := v.([]byte)
	if !ok {
		text, _ = json.Marshal(v)
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

func (j *token) String() string {
	signed := encoded(j.header) + "." + encoded(j.claims)
	alg := j.alg
	if alg == "" {
		alg, _ = j.header["alg"].(string)
	}
	whole := signed + "." + encoded(signature(alg, j.key, []byte(signed)))
	if j.bend != nil {
		whole = j.bend(whole)
	}
	return whole
}

// signature returns a JWS signature (RFC 7518). It is empty for an unknown algorithm.
func signature(alg string, key any, data []byte) []byte {
	var sum []byte
	hash := crypto.SHA256
	switch {
	case len(alg) < 3:
		return nil
	case alg[2:] == "256":
		s := sha256.Sum256(data)
		sum = s[:]
	case alg[2:] == "384":
		s := sha512.Sum384(data)
		sum, hash = s[:], crypto.SHA384
	case alg[2:] == "512":
		s := sha512.Sum512(data)
		sum, hash = s[:], crypto.SHA512
	}
	switch k := key.(type) {
	case *rsa.PrivateKey:
		if alg[:2] == "PS" {
			out, _ := rsa.SignPSS(rand.Reader, k, hash, sum, &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash})
			return out
		}
		out, _ := rsa.SignPKCS1v15(rand.Reader, k, hash, sum)
		return out
	case *ecdsa.PrivateKey:
		r, s, err := ecdsa.Sign(rand.Reader, k, sum)
		if err != nil {
			return nil
		}
		n := (k.Curve.Params().BitSize + 7) / 8
		return append(r.FillBytes(make([]byte, n)), s.FillBytes(make([]byte, n))...)
	case []byte:
		h := hmac.New(sha256.New, k)
		h.Write(data)
		return h.Sum(nil)
	}
	return nil
}

// certificates adds client certificates, valid and invalid.
func (a *axis) certificates(p *pair, c *credentials) {
	ca := authorityOf(a.t, p.theirs.server.CA)
	other := newAuthority(a.t, "ca") // the same name and another key
	subject := func(cn string, groups ...string) pkix.Name { return pkix.Name{CommonName: cn, Organization: groups} }
	add := func(name string, by *authority, s pkix.Name, change func(*x509.Certificate), between ...*authority) {
		t := template(s)
		if change != nil {
			change(t)
		}
		c.certificates = append(c.certificates, by.sign(name, t, between...))
	}
	middle, loose := ca.below("middle"), ca.below("loose")
	add("valid", ca, subject("carl", "dev", "ops"), nil)
	add("no groups", ca, subject("carl"), nil)
	add("masters", ca, subject("root", "system:masters"), nil)
	add("expired", ca, subject("carl"), func(t *x509.Certificate) { t.NotAfter = time.Now().Add(-time.Minute) })
	add("not yet", ca, subject("carl"), func(t *x509.Certificate) { t.NotBefore = time.Now().Add(time.Hour) })
	add("for servers", ca, subject("carl"), func(t *x509.Certificate) {
		t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
	add("for anything", ca, subject("carl"), func(t *x509.Certificate) {
		t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny}
	})
	add("no usage", ca, subject("carl"), func(t *x509.Certificate) { t.ExtKeyUsage = nil })
	add("another authority's", other, subject("carl", "system:masters"), nil)
	add("no name", ca, pkix.Name{Organization: []string{"system:masters"}}, nil)
	add("empty", ca, pkix.Name{}, nil)
	add("a system name", ca, subject("system:anonymous"), nil)
	add("a node", ca, subject("system:node:n1", "system:nodes"), nil)
	add("an account's name", ca, subject("system:serviceaccount:default:robot", "system:serviceaccounts"), nil)
	add("name twice", ca, pkix.Name{CommonName: "carl", ExtraNames: []pkix.AttributeTypeAndValue{
		{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "carl"},
		{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "admin"},
	}}, nil)
	add("a uid", ca, pkix.Name{CommonName: "carl", ExtraNames: []pkix.AttributeTypeAndValue{
		{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "carl"},
		{Type: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}, Value: "uid-1"},
	}}, nil)
	add("two uids", ca, pkix.Name{ExtraNames: []pkix.AttributeTypeAndValue{
		{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "carl"},
		{Type: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}, Value: "uid-1"},
		{Type: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}, Value: "uid-2"},
	}}, nil)
	add("group twice", ca, subject("carl", "dev", "dev"), nil)
	add("an empty group", ca, subject("carl", ""), nil)
	add("authenticated itself", ca, subject("carl", "system:authenticated", "system:unauthenticated"), nil)
	add("odd letters", ca, subject("ünï\tcode", "grüppe"), nil)
	add("long", ca, subject(strings.Repeat("n", 64), strings.Repeat("g", 64)), nil)
	add("many groups", ca, subject("carl", strings.Split(strings.Repeat("g,", 200)+"g", ",")...), nil)
	add("by a middle one", middle, subject("carl"), nil, middle)
	add("middle one missing", middle, subject("carl"), nil)
	add("wrong middle one", middle, subject("carl"), nil, loose)
	add("an authority itself", ca, subject("carl"), func(t *x509.Certificate) {
		t.IsCA, t.KeyUsage = true, x509.KeyUsageCertSign
	})
	add("a small serial number", ca, subject("carl"), func(t *x509.Certificate) { t.SerialNumber = big.NewInt(1) })
	add("the services' own name", ca, subject("system:watershed:authz", "dev"), nil)
}
