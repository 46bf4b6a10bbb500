package authn

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	bootstraptokenutil "k8s.io/cluster-bootstrap/util/tokens"
	"k8s.io/kubernetes/pkg/serviceaccount"

	commonv1 "watershed.dev/proto/watershed/common/v1"
)

const (
	protocolHeader = "Sec-Websocket-Protocol"
	// bearerProtocol is the prefix of the WebSocket subprotocol that contains a token
	// (k8s.io/apiserver/pkg/authentication/request/websocket).
	bearerProtocol = "base64url.bearer.authorization.k8s.io."
)

// clusterTokenTTL bounds the cache TTL of a response for a JWT or a bootstrap token. Such a token is invalid once its
// object (a pod, a ServiceAccount, a Secret) is deleted. authn's token cache adds up to 10 s.
const clusterTokenTTL = time.Second

// removeCredentials removes every credential from h, whichever authenticator accepted the request. The receiver of a
// forwarded request must not get any.
func (s *Service) removeCredentials(h http.Header) {
	h.Del("Authorization")
	if v := removeBearerProtocols(h.Values(protocolHeader)); len(v) == 0 {
		h.Del(protocolHeader)
	} else {
		h[protocolHeader] = v
	}
	if o := s.config.Options.RequestHeader; o != nil { // only a front proxy may send these
		headerrequest.ClearAuthenticationHeaders(h, headerrequest.StaticStringSlice(o.UsernameHeaders),
			headerrequest.StaticStringSlice(o.UIDHeaders),
			headerrequest.StaticStringSlice(o.GroupHeaders), headerrequest.StaticStringSlice(o.ExtraHeaderPrefixes))
	}
}

// removeBearerProtocols returns the values of Sec-WebSocket-Protocol without the subprotocols that contain a token.
func removeBearerProtocols(values []string) (out []string) {
	for _, v := range values {
		var protocols []string
		for _, p := range strings.Split(v, ",") {
			if p = strings.TrimSpace(p); !strings.HasPrefix(p, bearerProtocol) {
				protocols = append(protocols, p)
			}
		}
		if len(protocols) > 0 {
			out = append(out, strings.Join(protocols, ","))
		}
	}
	return out
}

// replacedHeaders returns the headers that authentication changed, with their new values. A removed header has no
// values.
func replacedHeaders(before, after http.Header) map[string]*commonv1.Values {
	out := map[string]*commonv1.Values{}
	for name, v := range before {
		if current := after[name]; !slices.Equal(v, current) {
			out[name] = &commonv1.Values{Values: current}
		}
	}
	return out
}

// cacheTTL returns how long a response may be cached: never longer than the credential is valid.
func (s *Service) cacheTTL(h http.Header, certificates []*x509.Certificate) time.Duration {
	ttl := s.config.CacheTTL
	for _, c := range certificates {
		ttl = min(ttl, time.Until(c.NotAfter))
	}
	for _, token := range bearerTokens(h) {
		if isBootstrapToken(token) {
			ttl = min(ttl, clusterTokenTTL)
		}
		parts := strings.Split(token, ".")
		if len(parts) != 3 {
			continue
		}
		ttl = min(ttl, clusterTokenTTL)
		if exp, ok := expiry(parts[1]); ok {
			ttl = min(ttl, time.Until(exp))
		}
	}
	return max(0, ttl)
}

// isBootstrapToken reports whether a token has the form of a bootstrap token.
func isBootstrapToken(token string) bool {
	_, _, err := bootstraptokenutil.ParseToken(token)
	return err == nil
}

// bearerTokens returns the bearer tokens of a request, from both headers that may contain one.
func bearerTokens(h http.Header) (tokens []string) {
	for _, v := range h.Values("Authorization") {
		// As upstream reads it: a third word is not a part of the token.
		parts := strings.SplitN(strings.TrimSpace(v), " ", 3)
		if len(parts) > 1 && strings.EqualFold(parts[0], "bearer") {
			tokens = append(tokens, parts[1])
		}
	}
	for _, v := range h.Values(protocolHeader) {
		for _, p := range strings.Split(v, ",") {
			if encoded, ok := strings.CutPrefix(strings.TrimSpace(p), bearerProtocol); ok {
				if token, err := base64.RawURLEncoding.DecodeString(encoded); err == nil {
					tokens = append(tokens, string(token))
				}
			}
		}
	}
	return tokens
}

// readsObjects reports whether upstream may read the objects of a token: the token is a JWT that claims an issuer of
// service account tokens (k8s.io/kubernetes/pkg/serviceaccount, hasCorrectIssuer). The claim is not verified.
func (s *Service) readsObjects(token string) bool {
	var c struct {
		Issuer string `json:"iss"`
	}
	parts := strings.Split(token, ".")
	accounts := s.config.Options.ServiceAccounts
	return len(parts) == 3 && decodeClaims(parts[1], &c) &&
		(c.Issuer == serviceaccount.LegacyIssuer || accounts != nil && slices.Contains(accounts.Issuers, c.Issuer))
}

// expiry returns exp of the claims of a verified JWT.
func expiry(claims string) (time.Time, bool) {
	var c struct {
		Exp *float64 `json:"exp"`
	}
	if !decodeClaims(claims, &c) || c.Exp == nil {
		return time.Time{}, false
	}
	return time.Unix(int64(*c.Exp), 0), true
}

// decodeClaims decodes the claims of a JWT into c. It returns false if they are malformed.
func decodeClaims(claims string, c any) bool {
	data, err := base64.RawURLEncoding.DecodeString(claims)
	return err == nil && json.Unmarshal(data, c) == nil
}
