{{- define "lmkit.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "lmkit.selector" -}}
app.kubernetes.io/name: lmkit
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lmkit.labels" -}}
{{ include "lmkit.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "lmkit.scheme" -}}
{{ if .Values.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}
